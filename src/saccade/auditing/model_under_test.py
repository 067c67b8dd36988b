"""The class `ModelUnderTest`: a model whose token embeddings can be replaced, to observe how its rows change."""

from __future__ import annotations

import inspect
import re
from collections.abc import Callable, Mapping
from functools import cached_property
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from saccade.auditing.finding import CounterExample
from saccade.auditing.float64 import TrueFloat64, describe_error, float64_copy
from saccade.auditing.inputs import InputFormat, find_tokens, is_transposed
from saccade.auditing.multi_process import broadcast_first, check_same, with_summed_gradient
from saccade.auditing.token_axes import is_time_first, names_time_first
from saccade.support.errors import type_error, value_error
from saccade.support.torch_modes import is_tracing

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup


def depth_of(name: str, layers: int) -> int:
    """Return the layer index of a module: the first number in its name, or the last layer if the name has no number."""
    numbers = [int(part) for part in re.split(r"[._]", name) if part.isdigit()]
    return min(numbers[0], layers - 1) if numbers else layers - 1


class NoGradientError(Exception):
    """An error raised if the outputs of a model under test have no gradients; the message says why."""


def rows_of(out: Any) -> Tensor:
    """Extract the output rows from a model's result: logits, hidden states, the tensor itself, or a tuple's first item.

    A tuple's first item is itself searched for logits, hidden states or a tensor.
    """
    for name in ("logits", "last_hidden_state"):
        if isinstance(rows := getattr(out, name, None), Tensor):
            return rows
    if isinstance(out, Mapping):
        out = next((out[name] for name in ("logits", "last_hidden_state") if name in out), out)
    if isinstance(out, tuple | list) and out:
        return rows_of(out[0])
    if isinstance(out, Tensor):
        return out
    rule = "return logits, last_hidden_state, or a tensor [batch, length, ...]"
    raise type_error("the model", rule, type(out).__name__, hint="outputs= takes a function that reads its rows")


class ModelUnderTest:
    """A model that maps tokens or embeddings to output rows, with access to the tokens' embeddings.

    Args:
        model: a module or a function.
        inputs: token ids ``[batch, length]`` or embeddings ``[batch, length, width]``, or all keyword arguments,
            including the token ids or embeddings.
        outputs: a function that extracts the rows ``[batch, length, ...]`` from the model's result; see `rows_of`.
            Rows ``[length, batch, ...]`` are detected and transposed.
        group: processes that run the model together; None for one process.
        form: the parts of the input format that cannot be inferred from the inputs.

    Attributes:
        tokens: the tokens or embeddings, batch first.
        vectors: the tokens' embeddings, ``[batch, length, width]``.
        rows: the model's outputs for these embeddings, ``[batch, length, ...]``.
        passes: number of forward and backward passes so far.
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
        self._rows_are_transposed = False  # used only if batch and length are equal; otherwise the shape decides
        self._find()
        check_same(self.tokens, group)
        self.rows = self.run()
        self._check(self.rows)
        if self.shape[0] == self.shape[1] > 1 and is_time_first(self.rows, self.run(self._other_text)):
            self._rows_are_transposed, self.rows = True, self.rows.transpose(0, 1)
        is_square = any(part.stop - part.start == self.shape[0] > 1 for part in self.parts.values())
        self._time_first = names_time_first(self.modules, self.run, self._other_text) if is_square else frozenset()

    def _find(self) -> None:
        """Find the tokens or their embeddings among the model's inputs."""
        self.raw_tokens = find_tokens(self.model, self.inputs, self.form.tokens)
        self.tokens = self.raw_tokens if self.form.batch_first else self.raw_tokens.transpose(0, 1).contiguous()
        self.vectors = self.tokens.detach()

    @property
    def module(self) -> nn.Module | None:
        """The model under test, or the module that it calls if it is a function; None if that is unknown."""
        return self.model if isinstance(self.model, nn.Module) else self.form.module

    @property
    def modules(self) -> dict[str, nn.Module]:
        """The model's submodules by name, without the embedding table; empty if no module is known."""
        named = () if self.module is None else self.module.named_modules()
        return {name: module for name, module in named if name and module is not self.table}

    @property
    def _other_text(self) -> Tensor:
        """A copy of the token embeddings in which those of the first batch item are changed."""
        draw = torch.Generator().manual_seed(0)
        changed = self.vectors.clone()
        changed[0] += torch.randn(changed[0].shape, generator=draw, dtype=torch.float64).to(changed)
        return changed

    def as_rows(self, name: str, x: Tensor) -> tuple[Tensor, bool] | None:
        """Return a module's input or output as rows ``[batch, length, ...]``, if it holds one row per token.

        Returns:
            Two values: the rows, and whether the tensor was ``[length, batch, ...]``. None if the tensor does not hold
            one row for each token that the module processes.
        """
        own, (batch, _), sizes = self.part_of(name), self.shape, tuple(x.shape[:2])
        length = own.stop - own.start
        is_transposed = name in self._time_first if batch == length else sizes == (length, batch)
        if sizes != ((length, batch) if is_transposed else (batch, length)):
            return None
        return (x.transpose(0, 1) if is_transposed else x), is_transposed

    @property
    def eager(self) -> ModelUnderTest:
        """The same model without compiled code, so that hooks run for every module."""
        return self

    @property
    def parts(self) -> dict[str, slice]:
        """The token range of each text that the model reads, by name. Only an encoder-decoder reads more than one."""
        return {"text": slice(0, self.shape[1])}

    def part_of(self, name: str) -> slice:
        """Return the range of tokens whose rows a module processes."""
        return slice(0, self.shape[1])

    def encoder_span(self, hidden: Tensor) -> slice | None:
        """Return the token range of the source if ``hidden`` is the output of an encoder; otherwise return None."""
        return None

    def layer_of(self, name: str, layers: int) -> int:
        """Return the index of a module's layer in a model with ``layers`` layers."""
        return depth_of(name, layers)

    def renumbered(self, finding: CounterExample) -> CounterExample:
        """Return a counter-example with positions counted from the start of their text, the source or the target."""
        return finding

    @property
    def shape(self) -> tuple[int, int]:
        """The number of batch items and the number of tokens."""
        return self.tokens.shape[0], self.tokens.shape[1]

    @property
    def borders(self) -> list[int]:
        """The tokens on both sides of each boundary between processes, if all processes hold equally many tokens."""
        size = 1 if self.group is None else self.group.size()
        return [self.shape[1] * rank // size + side for rank in range(1, size) for side in (-1, 0)]

    @cached_property
    def in_float64(self) -> tuple[ModelUnderTest | None, str]:
        """A float64 copy of the model for use within `TrueFloat64`, or None; and why there is no copy, or "".

        Cost: on first use, memory for a float64 copy of the model, and a few runs.
        """

        def wide(model: Callable[..., Any]) -> ModelUnderTest:
            inputs = self.inputs
            wider = (
                _to_float64(inputs)
                if isinstance(inputs, Tensor)
                else {name: _to_float64(one) for name, one in inputs.items()}
            )
            return type(self)(model, wider, self.outputs, self.group, self.form)

        model, why = float64_copy(self.model, lambda model: wide(model).run())
        if model is None:
            return None, why
        with TrueFloat64():
            return wide(model), ""

    def run(self, vectors: Tensor | None = None) -> Tensor:
        """Run the model without gradients and return its rows; ``vectors``, if passed, replace the token embeddings."""
        with torch.no_grad():
            return broadcast_first(self._run(vectors), self.group)

    def graph(self, vectors: Tensor | None = None) -> tuple[Tensor, Tensor]:
        """Run the model with gradients, and return the token embeddings as a leaf tensor and the output rows.

        If ``vectors`` are passed, they replace the token embeddings.

        Raises:
            NoGradientError: the outputs have no gradient, or a kernel has no backward pass.
        """
        leaf = (self.vectors if vectors is None else vectors).clone().requires_grad_()
        with torch.enable_grad():
            try:
                out = self._run(with_summed_gradient(leaf, self.group))
            except NotImplementedError as error:
                raise NoGradientError(describe_error(error)) from error
        if not out.requires_grad:
            raise NoGradientError("the outputs have no gradient")
        return leaf, out

    def _run(self, vectors: Tensor | None) -> Tensor:
        self.passes += 1
        if self.tokens.is_floating_point():
            return self._in_rows(self._call_model(self.tokens if vectors is None else vectors))
        is_traced: list[bool] = []

        def swap(module: nn.Module, arguments: tuple[Any, ...], out: Tensor) -> Tensor | None:
            transposed = (
                is_transposed(arguments[0], self.tokens) if arguments and self.table in (None, module) else None
            )
            if transposed is None:
                return None
            if self.table is None:
                own = out.reshape(*(self.shape[::-1] if transposed else self.shape), -1)
                self.table, self.vectors = module, (own.transpose(0, 1) if transposed else own).detach().clone()
            is_traced.append(is_tracing())
            if vectors is None:
                return None
            changed = vectors.transpose(0, 1) if transposed else vectors
            return changed.clone(memory_format=torch.contiguous_format).view(out.shape)  # some models scale it in place

        tables = [] if self.module is None else [own for own in self.module.modules() if isinstance(own, nn.Embedding)]
        handles = [own.register_forward_hook(swap) for own in tables]
        try:
            called = self._call_model(self.tokens)
        finally:
            for handle in handles:
                handle.remove()
        if not is_traced or any(is_traced):
            raise _no_table(self.module, len(tables), is_compiled=bool(is_traced))
        return self._in_rows(called)

    def _call_model(self, tokens: Tensor) -> Any:
        if tokens is self.tokens:
            tokens = self.raw_tokens
        elif not self.form.batch_first:
            tokens = tokens.transpose(0, 1).contiguous()
        if isinstance(self.inputs, Tensor):
            return self.model(tokens)
        return self.model(**{name: tokens if one is self.raw_tokens else one for name, one in self.inputs.items()})

    def _in_rows(self, out: Any) -> Tensor:
        """Extract the output rows ``[batch, length, ...]`` from the model's result."""
        rows, (batch, length) = self.outputs(out), self.shape
        is_transposed = self._rows_are_transposed if batch == length else tuple(rows.shape[:2]) == (length, batch)
        return rows.transpose(0, 1) if is_transposed else rows

    def _check(self, rows: Tensor) -> None:
        if rows.dim() < 2 or tuple(rows.shape[:2]) != self.shape:
            rule = f"return rows [{self.shape[0]}, {self.shape[1]}, ...], one for each token"
            hint = "outputs= takes a function that reads them, and inputs= a mapping of all arguments"
            raise value_error("the model", rule, list(rows.shape), hint=hint)


def can_cache(model: nn.Module) -> bool:
    """Return whether a transformers model takes ``use_cache``, as a parameter or through its ``**kwargs``."""
    parameters = inspect.signature(model.forward).parameters
    has_kwargs = any(one.kind is one.VAR_KEYWORD for one in parameters.values())
    return "use_cache" in parameters or (has_kwargs and hasattr(getattr(model, "config", None), "use_cache"))


def _no_table(module: nn.Module | None, tables: int, *, is_compiled: bool) -> ValueError:
    """Build the error for a model under test whose token embeddings cannot be replaced."""
    if module is None:
        hint = "module= names the model that a function calls; or pass embeddings [batch, length, width]"
        return value_error(
            "module", "be given for a function of tokens, because its embedding tables are unknown", None, hint=hint
        )
    hint = "pass embeddings [batch, length, width], if the model takes them"
    rule = "look up the tokens in a torch.nn.Embedding, so that their vectors can be changed"
    got = "a table inside compiled code" if is_compiled else f"{tables} tables, none of which looks them up"
    return value_error("the model", rule, got, hint=hint)


def _to_float64(value: Any) -> Any:
    return value.double() if isinstance(value, Tensor) and value.is_floating_point() else value


def check_no_dropout(model: object) -> None:
    """Raise an error if the audited model is in training mode with dropout, because two runs would not agree."""
    if not isinstance(model, nn.Module):
        return
    drops = [name for name, own in model.named_modules() if isinstance(own, nn.Dropout) and own.training and own.p > 0]
    if drops:
        hint = "call model.eval(); or set p to 0 and audit the model in training mode"
        raise value_error("model", "have no active dropout", f"training mode, with {drops[0] or 'dropout'}", hint=hint)
