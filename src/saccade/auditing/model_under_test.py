"""Subject: a model from tokens to rows of outputs, whose token vectors can be changed."""

from __future__ import annotations

import inspect
import re
from collections.abc import Callable, Mapping
from functools import cached_property
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from saccade.auditing.finding import Finding
from saccade.auditing.float64 import TrueFloat64, float64_copy, said
from saccade.auditing.inputs import InputFormat, found_tokens, is_turned
from saccade.auditing.multi_process import agreed, check_same, shared
from saccade.auditing.token_axes import is_time_first, names_time_first
from saccade.support.errors import type_error, value_error
from saccade.support.torch_modes import is_tracing

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup


def depth_of(name: str, layers: int) -> int:
    """In which layer a module stands: the first number in its name; behind all layers if there is none."""
    numbers = [int(part) for part in re.split(r"[._]", name) if part.isdigit()]
    return min(numbers[0], layers - 1) if numbers else layers - 1


class NoGradientError(Exception):
    """Outputs cannot be asked for gradients; the message says why."""


def rows_of(out: Any) -> Tensor:
    """The rows of what a model returns: logits, hidden states, the tensor itself, or the first of a tuple."""
    for name in ("logits", "last_hidden_state"):
        if isinstance(found := getattr(out, name, None), Tensor):
            return found
    if isinstance(out, Mapping):
        out = next((out[name] for name in ("logits", "last_hidden_state") if name in out), out)
    if isinstance(out, tuple | list) and out:
        return rows_of(out[0])
    if isinstance(out, Tensor):
        return out
    rule = "return logits, last_hidden_state, or a tensor [batch, length, ...]"
    raise type_error("the model", rule, type(out).__name__, hint="outputs= takes a function that reads its rows")


class Subject:
    """A model from tokens, or from vectors, to rows of outputs, with the vectors of the tokens in hand.

    Args:
        model: a module or a function.
        inputs: token ids or vectors, ``[batch, length]`` or ``[batch, length, width]``; or all keyword arguments, with
            one of these among them.
        outputs: reads the rows ``[batch, length, ...]`` of what the model returns; see `rows_of`. Rows
            ``[length, batch, ...]`` are recognised.
        group: processes that run the model together; None where it takes one.
        form: what the inputs do not say of themselves.

    Attributes:
        given: the tokens or vectors, batch first.
        vectors: the tokens' vectors, ``[batch, length, width]``.
        rows: the model's own outputs, ``[batch, length, ...]``.
        passes: forward and backward passes so far.
    """

    def __init__(
        self,
        model: Callable[..., Any],
        inputs: Tensor | Mapping[str, Any],
        outputs: Callable[[Any], Tensor] = rows_of,
        group: ProcessGroup | None = None,
        form: InputFormat | None = None,
    ):
        self.model, self.inputs, self.outputs, self.group = model, inputs, outputs, group
        self.form = InputFormat() if form is None else form
        self.passes = 0
        self.table: nn.Module | None = None
        self._rows_are_turned = False  # where there are as many texts as tokens; else their shape says it
        self._find()
        check_same(self.given, group)
        self.rows = self.run()
        self._check(self.rows)
        if self.shape[0] == self.shape[1] > 1 and is_time_first(self.rows, self.run(self._other_text)):
            self._rows_are_turned, self.rows = True, self.rows.transpose(0, 1)
        is_square = any(part.stop - part.start == self.shape[0] > 1 for part in self.parts.values())
        self._time_first = names_time_first(self.modules, self.run, self._other_text) if is_square else frozenset()

    def _find(self) -> None:
        """Find the tokens, or their vectors, among the inputs."""
        self.handed = found_tokens(self.model, self.inputs, self.form.tokens)
        self.given = self.handed if self.form.batch_first else self.handed.transpose(0, 1).contiguous()
        self.vectors = self.given.detach()

    @property
    def module(self) -> nn.Module | None:
        """The model, or the one that a function calls; None where it is not known."""
        return self.model if isinstance(self.model, nn.Module) else self.form.module

    @property
    def modules(self) -> dict[str, nn.Module]:
        """Modules of the model by name, but for the table of embeddings; none of a function."""
        named = () if self.module is None else self.module.named_modules()
        return {name: module for name, module in named if name and module is not self.table}

    @property
    def _other_text(self) -> Tensor:
        """The vectors, with others for all tokens of the first batch item."""
        draw = torch.Generator().manual_seed(0)
        changed = self.vectors.clone()
        changed[0] += torch.randn(changed[0].shape, generator=draw, dtype=torch.float64).to(changed)
        return changed

    def as_rows(self, name: str, x: Tensor) -> tuple[Tensor, bool] | None:
        """Return a tensor of a module as rows ``[batch, length, ...]``, and whether its tokens came first.

        Returns:
            None for a tensor that holds no rows of the module's text.
        """
        own, (batch, _), sizes = self.part_of(name), self.shape, tuple(x.shape[:2])
        length = own.stop - own.start
        is_turned = name in self._time_first if batch == length else sizes == (length, batch)
        if sizes != ((length, batch) if is_turned else (batch, length)):
            return None
        return (x.transpose(0, 1) if is_turned else x), is_turned

    @property
    def as_written(self) -> Subject:
        """The same, where hooks see every module that runs."""
        return self

    @property
    def parts(self) -> dict[str, slice]:
        """The texts that a model reads, and which tokens are theirs: one text here."""
        return {"text": slice(0, self.shape[1])}

    def part_of(self, name: str) -> slice:
        """Which tokens' rows a module is given."""
        return slice(0, self.shape[1])

    def read_from(self, hidden: Tensor) -> slice | None:
        """The tokens of the text that was made into these rows for another one to look at; None where there is none."""
        return None

    def layer_of(self, name: str, layers: int) -> int:
        """In which of so many layers a module stands."""
        return depth_of(name, layers)

    def told(self, finding: Finding) -> Finding:
        """A finding, with places counted in their own texts."""
        return finding

    @property
    def shape(self) -> tuple[int, int]:
        """Batch items and tokens."""
        return self.given.shape[0], self.given.shape[1]

    @property
    def borders(self) -> list[int]:
        """Tokens on both sides of where the shares of two processes meet, if all have as many tokens."""
        size = 1 if self.group is None else self.group.size()
        return [self.shape[1] * rank // size + side for rank in range(1, size) for side in (-1, 0)]

    @cached_property
    def in_float64(self) -> tuple[Subject | None, str]:
        """The same in float64, for use within `TrueFloat64`; else None and the reason.

        Cost: a copy of the model in float64, and a few runs; once.
        """

        def wide(model: Callable[..., Any]) -> Subject:
            inputs = self.inputs
            given = _wide(inputs) if isinstance(inputs, Tensor) else {name: _wide(one) for name, one in inputs.items()}
            return type(self)(model, given, self.outputs, self.group, self.form)

        model, why = float64_copy(self.model, lambda model: wide(model).run())
        if model is None:
            return None, why
        with TrueFloat64():
            return wide(model), ""

    def run(self, vectors: Tensor | None = None) -> Tensor:
        """Rows of outputs, with other vectors in the place of the tokens' own; without gradient."""
        with torch.no_grad():
            return agreed(self._run(vectors), self.group)

    def graph(self, vectors: Tensor | None = None) -> tuple[Tensor, Tensor]:
        """Vectors, the tokens' own when None, as a leaf; and rows of outputs that depend on them.

        Raises:
            NoGradientError: the outputs have none, or a kernel without a backward pass refuses.
        """
        leaf = (self.vectors if vectors is None else vectors).clone().requires_grad_()
        with torch.enable_grad():
            try:
                out = self._run(shared(leaf, self.group))
            except NotImplementedError as error:
                raise NoGradientError(said(error)) from error
        if not out.requires_grad:
            raise NoGradientError("the outputs have no gradient")
        return leaf, out

    def _run(self, vectors: Tensor | None) -> Tensor:
        self.passes += 1
        if self.given.is_floating_point():
            return self._in_rows(self._called(self.given if vectors is None else vectors))
        is_traced: list[bool] = []

        def swap(module: nn.Module, arguments: tuple[Any, ...], out: Tensor) -> Tensor | None:
            turned = is_turned(arguments[0], self.given) if arguments and self.table in (None, module) else None
            if turned is None:
                return None
            if self.table is None:
                own = out.reshape(*(self.shape[::-1] if turned else self.shape), -1)
                self.table, self.vectors = module, (own.transpose(0, 1) if turned else own).detach().clone()
            is_traced.append(is_tracing())
            if vectors is None:
                return None
            changed = vectors.transpose(0, 1) if turned else vectors
            return changed.clone(memory_format=torch.contiguous_format).view(out.shape)  # some scale it in place

        tables = [] if self.module is None else [own for own in self.module.modules() if isinstance(own, nn.Embedding)]
        handles = [own.register_forward_hook(swap) for own in tables]
        try:
            called = self._called(self.given)
        finally:
            for handle in handles:
                handle.remove()
        if not is_traced or any(is_traced):
            raise _no_table(self.module, len(tables), is_compiled=bool(is_traced))
        return self._in_rows(called)

    def _called(self, given: Tensor) -> Any:
        if given is self.given:
            given = self.handed
        elif not self.form.batch_first:
            given = given.transpose(0, 1).contiguous()
        if isinstance(self.inputs, Tensor):
            return self.model(given)
        return self.model(**{name: given if value is self.handed else value for name, value in self.inputs.items()})

    def _in_rows(self, out: Any) -> Tensor:
        """The rows of what the model returns, ``[batch, length, ...]``."""
        rows, (batch, length) = self.outputs(out), self.shape
        is_turned = self._rows_are_turned if batch == length else tuple(rows.shape[:2]) == (length, batch)
        return rows.transpose(0, 1) if is_turned else rows

    def _check(self, rows: Tensor) -> None:
        if rows.dim() < 2 or tuple(rows.shape[:2]) != self.shape:
            rule = f"give rows [{self.shape[0]}, {self.shape[1]}, ...], one for each token"
            hint = "outputs= takes a function that reads them, and inputs= a mapping of all arguments"
            raise value_error("the model", rule, list(rows.shape), hint=hint)


def can_cache(model: nn.Module) -> bool:
    """Whether a model of transformers can be told not to fill a cache: by a parameter, or by one that it hands on."""
    known = inspect.signature(model.forward).parameters
    hands_on = any(one.kind is one.VAR_KEYWORD for one in known.values())
    return "use_cache" in known or (hands_on and hasattr(getattr(model, "config", None), "use_cache"))


def _no_table(module: nn.Module | None, tables: int, *, is_compiled: bool) -> ValueError:
    """The error for a model whose tokens' vectors cannot be changed."""
    if module is None:
        hint = "module= names the model that a function calls; or give vectors [batch, length, width]"
        return value_error("module", "be given for a function of tokens, whose tables are not seen", None, hint=hint)
    hint = "give vectors [batch, length, width], which such a model must take"
    rule = "look the tokens up in a torch.nn.Embedding, whose vectors can be changed"
    got = "one that is asked in compiled code" if is_compiled else f"{tables} tables, none of which is asked for them"
    return value_error("the model", rule, got, hint=hint)


def _wide(value: Any) -> Any:
    return value.double() if isinstance(value, Tensor) and value.is_floating_point() else value
