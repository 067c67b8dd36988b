"""A compiled model as a subject: compiled code takes no notice of hooks, so it is given vectors instead of tokens."""

from __future__ import annotations

import inspect
import sys
from collections.abc import Callable, Mapping
from contextlib import nullcontext
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from saccade.auditing.inputs import InputFormat
from saccade.auditing.model_under_test import Subject, rows_of
from saccade.support.errors import value_error

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup


def bare(model: Callable[..., Any]) -> Any:
    """The module that ``torch.compile`` was given, with its own type and ``forward``; others as they are."""
    return getattr(model, "_orig_mod", model)


def is_compiled(model: object) -> bool:
    """Whether a module, or one in it, was compiled by ``torch.compile(module)`` or by ``module.compile()``."""
    return isinstance(model, nn.Module) and any(map(_is_compiled, model.modules()))


def eagerly() -> Any:
    """While this lasts, what was compiled runs as it is written."""
    if "torch._dynamo" not in sys.modules:  # nothing was compiled, and its import takes seconds
        return nullcontext()
    return torch.compiler.set_stance("force_eager")


class CompiledSubject(Subject):
    """A model that is compiled, or of which a part is.

    What it does from end to end is what its compiled code does. Modules are looked at in `as_written`.

    Args:
        model, inputs, outputs, group, form: see `Subject`. A model whose table of embeddings is compiled must take
            vectors as ``inputs_embeds``.
    """

    def __init__(
        self,
        model: Callable[..., Any],
        inputs: Tensor | Mapping[str, Any],
        outputs: Callable[[Any], Tensor] = rows_of,
        group: ProcessGroup | None = None,
        form: InputFormat | None = None,
    ):
        self._written = _Written(bare(model), inputs, outputs, group, form)
        fed = _fed(model, self._written)
        form = self._written.form
        super().__init__(model, fed, outputs, group, form if fed is inputs else form._replace(tokens=None))

    def run(self, vectors: Tensor | None = None) -> Tensor:
        return super().run(vectors).clone()  # a graph of CUDA writes the next outputs into the same memory

    @property
    def modules(self) -> dict[str, nn.Module]:
        return self._written.modules

    @property
    def as_written(self) -> Subject:
        return self._written

    @property
    def in_float64(self) -> tuple[Subject | None, str]:
        return self._written.in_float64


class _Written(Subject):
    """The model as it is written, without compiled code."""

    @property
    def modules(self) -> dict[str, nn.Module]:
        return {name.replace("_orig_mod.", "").removesuffix("._orig_mod"): own for name, own in super().modules.items()}

    def _run(self, vectors: Tensor | None) -> Tensor:
        with eagerly():
            return super()._run(vectors)


def _fed(model: Callable[..., Any], written: Subject) -> Tensor | Mapping[str, Any]:
    """Inputs of compiled code: with vectors in the place of tokens, if it looks the tokens up itself."""
    compiled = [own for own in model.modules() if _is_compiled(own)] if isinstance(model, nn.Module) else []
    if not any(own is written.table for one in compiled for own in one.modules()):
        return written.inputs
    if "inputs_embeds" not in inspect.signature(bare(model).forward).parameters:
        rule = "take inputs_embeds, since compiled code takes no notice of changes by hooks"
        hint = "audit it before it is compiled; or compile what stands behind its table, and give inputs= vectors"
        raise value_error("a compiled model", rule, type(bare(model)).__name__, hint=hint)
    others = {} if isinstance(written.inputs, Tensor) else written.inputs
    kept = {name: value for name, value in others.items() if value is not written.handed}
    vectors = written.vectors if written.form.batch_first else written.vectors.transpose(0, 1).contiguous()
    return kept | {"inputs_embeds": vectors}


def _is_compiled(module: nn.Module) -> bool:
    return hasattr(module, "_orig_mod") or module._compiled_call_impl is not None
