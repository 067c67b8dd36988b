"""A compiled model under test, which receives embeddings instead of tokens because compiled code ignores hooks."""

from __future__ import annotations

import inspect
import sys
from collections.abc import Callable, Mapping
from contextlib import nullcontext
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from saccade.auditing.inputs import InputFormat
from saccade.auditing.model_under_test import ModelUnderTest, rows_of
from saccade.support.errors import value_error

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup


def uncompiled(model: Callable[..., Any]) -> Any:
    """Return the module that was passed to ``torch.compile``, or the model itself if the model is not compiled."""
    return getattr(model, "_orig_mod", model)


def is_compiled(model: object) -> bool:
    """Return whether a module or a submodule was compiled by ``torch.compile(module)`` or ``module.compile()``."""
    return isinstance(model, nn.Module) and any(map(_is_compiled, model.modules()))


def run_eagerly() -> Any:
    """Return a context manager in which compiled models run eagerly."""
    if "torch._dynamo" not in sys.modules:  # if nothing was compiled, avoid an import that takes seconds
        return nullcontext()
    return torch.compiler.set_stance("force_eager")


class CompiledModelUnderTest(ModelUnderTest):
    """A fully or partly compiled model under test.

    The end-to-end checks run the compiled code. Modules are tested on `eager`, without compilation.

    Args:
        model, inputs, outputs, group, form: see `ModelUnderTest`. A model whose embedding table is compiled must take
            embeddings as ``inputs_embeds``.
    """

    def __init__(
        self,
        model: Callable[..., Any],
        inputs: Tensor | Mapping[str, Any],
        outputs: Callable[[Any], Tensor] = rows_of,
        group: ProcessGroup | None = None,
        form: InputFormat | None = None,
    ):
        self._eager = _EagerModelUnderTest(uncompiled(model), inputs, outputs, group, form)
        vector_inputs = _vector_inputs(model, self._eager)
        form = self._eager.form
        super().__init__(
            model, vector_inputs, outputs, group, form if vector_inputs is inputs else form._replace(tokens=None)
        )

    def run(self, vectors: Tensor | None = None) -> Tensor:
        return super().run(vectors).clone()  # a CUDA graph would write the next outputs into the same memory

    @property
    def modules(self) -> dict[str, nn.Module]:
        return self._eager.modules

    @property
    def eager(self) -> ModelUnderTest:
        return self._eager

    @property
    def in_float64(self) -> tuple[ModelUnderTest | None, str]:
        return self._eager.in_float64


class _EagerModelUnderTest(ModelUnderTest):
    """A compiled model under test that runs eagerly, without its compiled code."""

    @property
    def modules(self) -> dict[str, nn.Module]:
        return {name.replace("_orig_mod.", "").removesuffix("._orig_mod"): own for name, own in super().modules.items()}

    def _run(self, vectors: Tensor | None) -> Tensor:
        with run_eagerly():
            return super()._run(vectors)


def _vector_inputs(model: Callable[..., Any], eager: ModelUnderTest) -> Tensor | Mapping[str, Any]:
    """Return the inputs for a compiled model, with embeddings instead of tokens if the embedding table is compiled."""
    compiled = [own for own in model.modules() if _is_compiled(own)] if isinstance(model, nn.Module) else []
    if not any(own is eager.table for one in compiled for own in one.modules()):
        return eager.inputs
    if "inputs_embeds" not in inspect.signature(uncompiled(model).forward).parameters:
        rule = "take inputs_embeds, since hooks cannot change tensors in compiled code"
        hint = "audit it before compiling it; or compile only the part after its table, and pass vectors as inputs="
        raise value_error("a compiled model", rule, type(uncompiled(model)).__name__, hint=hint)
    others = {} if isinstance(eager.inputs, Tensor) else eager.inputs
    kept = {name: value for name, value in others.items() if value is not eager.raw_tokens}
    vectors = eager.vectors if eager.form.batch_first else eager.vectors.transpose(0, 1).contiguous()
    return kept | {"inputs_embeds": vectors}


def _is_compiled(module: nn.Module) -> bool:
    return hasattr(module, "_orig_mod") or module._compiled_call_impl is not None
