"""Autograd functions for kernels that define a backward pass. They support second derivatives and `vmap`."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from saccade.engine import nonfinite, second_order
from saccade.engine.dropout import Dropped
from saccade.engine.inputs import AttentionInputs
from saccade.engine.kernels.kernel import Backward, Kernel, KernelWithBackward, Tensors
from saccade.engine.kernels.tiled import Tiled
from saccade.support.errors import unsupported
from saccade.support.torch_modes import current_transform_level, has_values, is_transformed, without_autocast

CALLED_AS = "attention"  # in errors

_TILED = Tiled()


def empty_results(inputs: AttentionInputs, value: Tensor) -> tuple[Tensor, Tensor]:
    """Return uninitialised tensors with the shapes and dtypes of a kernel's output and lse."""
    out = value.new_empty(*inputs.shape[:3], value.shape[3])
    return out, out.new_empty(inputs.shape[:3], dtype=inputs.compute_dtype)


def is_recorded(inputs: AttentionInputs, value: Tensor) -> bool:
    """Return whether autograd or a transform such as `vmap` needs the kernel wrapped in an autograd function."""
    if is_transformed():
        return True
    if not torch.is_grad_enabled():
        return False
    for x in inputs.sources(value):  # noqa: SIM110  a generator would cost one call per source
        if x is not None and x.requires_grad:
            return True
    return False


def differentiable(
    kernel: Kernel, inputs: AttentionInputs, value: Tensor, dropped: Dropped | None
) -> tuple[Tensor, Tensor]:
    """Run a kernel as a single autograd function and return its output and lse."""
    if not is_transformed():
        return _Product.apply(kernel, inputs.emptied(), dropped, *inputs.sources(value))
    try:
        return _TransformedProduct.apply(kernel, inputs.emptied(), dropped, *inputs.sources(value))
    except RuntimeError as error:
        if isinstance(error, NotImplementedError) or not inputs.rule.calls_functions:
            raise
        # The mapped axis has been folded into the batch, but not in tensors that the function captured.
        reason = "the mask function could not be called; it may read a mapped tensor"
        hint = "pass what it reads as part of the mask, e.g. masks.Dense for each batch item, outside of vmap"
        raise unsupported("vmap", [reason], hint=hint) from error


def twice_differentiable(
    inputs: AttentionInputs, value: Tensor, out: Tensor, lse: Tensor | None
) -> tuple[Tensor, Tensor | None]:
    """Return a kernel's output and lse unchanged, but with gradients that can be differentiated again."""
    if not out.requires_grad:
        return out, lse
    again, *others = _Redifferentiable.apply(inputs.emptied(), out, lse, *inputs.sources(value))
    return again, (others[0] if others else None)


class _Redifferentiable(torch.autograd.Function):
    """Autograd function that leaves gradients to the kernel, or to `tiled` if they will be differentiated again."""

    @staticmethod
    def forward(
        ctx: Any, inputs: AttentionInputs, out: Tensor, lse: Tensor | None, *sources: Tensor
    ) -> tuple[Tensor, ...]:
        ctx.inputs = inputs
        ctx.save_for_backward(*sources)
        ctx.set_materialize_grads(False)
        return (out.detach(),) if lse is None else (out.detach(), lse.detach())

    @staticmethod
    def backward(ctx: Any, grad_out: Tensor | None, grad_lse: Tensor | None = None) -> tuple[Tensor | None, ...]:
        if not torch.is_grad_enabled():
            return None, grad_out, grad_lse, *(None,) * len(ctx.saved_tensors)
        with torch.no_grad():
            out, lse = _run_kernel(_TILED, ctx.inputs, None, *ctx.saved_tensors)
        grad_out = torch.zeros_like(out) if grad_out is None else grad_out
        wanted = ctx.needs_input_grad[3:]
        grads = _BackwardPass.apply(_TILED, ctx.inputs, None, wanted, out, lse, grad_out, grad_lse, *ctx.saved_tensors)
        return None, None, None, *grads


class _Product(torch.autograd.Function):
    """Autograd function that runs a kernel's forward and backward passes."""

    @staticmethod
    def forward(*arguments: Any) -> tuple[Tensor, Tensor]:
        ctx, *rest = arguments
        results = _run_kernel(*rest)
        _save_for_backward(ctx, rest, results)
        return results

    @staticmethod
    def backward(ctx: Any, grad_out: Tensor | None, grad_lse: Tensor | None) -> tuple[Tensor | None, ...]:
        # Unpacking also raises if a mask was changed in place since the forward pass.
        saved = ctx.saved_tensors
        tensors, (out, lse) = saved[: ctx.count], saved[ctx.count : ctx.count + 2]
        if grad_out is None and grad_lse is None:
            return (None,) * (ctx.count + 3)
        refuse_batched(grad_out, grad_lse)
        grad_out = torch.zeros_like(out) if grad_out is None else grad_out
        wanted = ctx.needs_input_grad[3:]
        results = (out, lse, grad_out, grad_lse)
        gradients = _BackwardPass.apply if torch.is_grad_enabled() or is_transformed() else _BackwardPass.forward
        grads = gradients(ctx.kernel, ctx.inputs, ctx.dropped, wanted, *results, *tensors)
        return None, None, None, *grads


def _run_kernel(
    kernel: Kernel, inputs: AttentionInputs, dropped: Dropped | None, *tensors: Tensor | None
) -> tuple[Tensor, Tensor]:
    full, value = inputs.of_sources(tensors)
    if not has_values(value):
        return empty_results(full, value)
    out, lse = nonfinite.forward(kernel, full, value, dropped)
    assert lse is not None  # kernels with a backward pass always return an lse
    return out, lse


def _save_for_backward(ctx: Any, inputs: Sequence[Any], output: tuple[Tensor, Tensor]) -> None:
    ctx.kernel, ctx.inputs, ctx.dropped, *tensors = inputs
    ctx.save_for_backward(*tensors, *output, *ctx.inputs.rule.tensors())
    ctx.count = len(tensors)
    ctx.set_materialize_grads(False)


class _TransformedProduct(_Product):
    """Variant of `_Product` with ``setup_context``, which ``torch.func`` transforms require. It is slower to call."""

    @staticmethod
    def forward(*inputs: Any) -> tuple[Tensor, Tensor]:
        return _run_kernel(*inputs)

    setup_context = staticmethod(_save_for_backward)

    @staticmethod
    def vmap(
        info: Any,
        in_dims: tuple[int | None, ...],
        kernel: Kernel,
        inputs: AttentionInputs,
        dropped: Dropped | None,
        *rest: Any,
    ) -> tuple[tuple[Tensor, Tensor], tuple[int, int]]:
        """Run the kernel once for all samples of `vmap`, with the mapped axis folded into the batch."""
        size = info.batch_size
        folded, tensors = folded_into_batch(inputs, rest, in_dims[3:], size)
        out, lse = _TransformedProduct.apply(kernel, folded, _folded_dropout(dropped, inputs, size), *tensors)
        return (out.unflatten(0, (size, -1)), lse.unflatten(0, (size, -1))), (0, 0)


class _BackwardPass(torch.autograd.Function):
    """Autograd function that wraps a kernel's backward pass, so that its gradients can be differentiated again."""

    @staticmethod
    def forward(
        kernel: KernelWithBackward,
        inputs: AttentionInputs,
        dropped: Dropped | None,
        wanted: tuple[bool, ...],
        *tensors: Any,
    ) -> Tensors:
        results, sources = Backward(*tensors[:4]), tensors[4:]
        if not has_values(results.out):
            return _empty_gradients(sources, wanted)
        full, value = inputs.of_sources(sources)
        with without_autocast(inputs.device):  # the backward pass may run within autocast
            grads = nonfinite.backward(kernel, full, value, dropped, results, wanted)
        return tuple(
            grad if grad is None or x is None or grad.dtype == x.dtype else grad.to(x.dtype)
            for grad, x in zip(grads, sources, strict=True)
        )

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Tensors) -> None:
        _, ctx.inputs, ctx.dropped, _, _, *tensors = inputs
        ctx.save_for_backward(*tensors)
        ctx.set_materialize_grads(False)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor | None) -> tuple[Tensor | None, ...]:
        refuse_batched(*grads)
        needed = ctx.needs_input_grad[6:]
        again = torch.is_grad_enabled() and not is_transformed()
        second = _second_derivatives if again or not is_transformed() else _SecondDerivatives.apply
        with without_autocast(ctx.inputs.device):
            *of_sources, of_out, of_lse = second(ctx.inputs, ctx.dropped, needed, again, *ctx.saved_tensors, *grads)
        # Return None for the output and the lse, since the gradients of the sources include the paths through them.
        return None, None, None, None, None, None, of_out, of_lse, *of_sources

    @staticmethod
    def vmap(
        info: Any,
        in_dims: tuple[int | None, ...],
        kernel: Kernel,
        inputs: AttentionInputs,
        dropped: Dropped | None,
        wanted: tuple[bool, ...],
        *rest: Any,
    ) -> tuple[Tensors, tuple[int | None, ...]]:
        size = info.batch_size
        results = [into_batch(x, dim, size) for x, dim in zip(rest[:4], in_dims[4:8], strict=True)]
        folded, tensors = folded_into_batch(inputs, rest[4:], in_dims[8:], size)
        folded_dropout = _folded_dropout(dropped, inputs, size)
        grads = [
            None if x is None else x.unflatten(0, (size, -1))
            for x in _BackwardPass.apply(kernel, folded, folded_dropout, wanted, *results, *tensors)
        ]
        # Autograd sums the gradient of a bias over the batch items that share it, as for any broadcast tensor.
        return tuple(grads), tuple(None if x is None else 0 for x in grads)


def refuse_batched(*grads: Tensor | None) -> None:
    """Raise an error for batched gradients (``is_grads_batched=True``), because their values cannot be read."""
    if any(x is not None and torch._C._functorch.is_legacy_batchedtensor(x) for x in grads):
        reason = "its backward pass takes one gradient at a time"
        hint = "vectorize=False, or torch.func.jacrev, which takes many at once"
        raise unsupported("is_grads_batched=True (vectorize=True)", [reason], hint=hint)


def _empty_gradients(tensors: Tensors, wanted: Sequence[bool]) -> Tensors:
    return tuple(
        torch.empty_like(x) if x is not None and want else None for x, want in zip(tensors, wanted, strict=True)
    )


def _second_derivatives(
    inputs: AttentionInputs,
    dropped: Dropped | None,
    needed: Sequence[bool],
    create_graph: bool,
    *tensors: Tensor | None,
) -> Tensors:
    """Return a kernel's second derivatives with respect to its source tensors, ``grad_out`` and ``grad_lse``."""
    lse, grad_out, grad_lse, *both = tensors
    assert lse is not None
    assert grad_out is not None
    sources, grads = both[: len(both) // 2], both[len(both) // 2 :]
    needed = (*needed[2:], *needed[:2])
    if not has_values(lse):
        return _empty_gradients((*sources, grad_out, grad_lse), needed)
    full, value = inputs.of_sources(tuple(sources))
    of = second_order.Backward(full, value, dropped, lse, grad_out, grad_lse)
    return second_order.derivatives(of, tuple(grads), needed, create_graph=create_graph)


class _SecondDerivatives(torch.autograd.Function):
    """Autograd function that computes second derivatives inside transforms such as `vmap`."""

    forward = staticmethod(_second_derivatives)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Tensors) -> None:
        pass

    @staticmethod
    def backward(ctx: Any, *grads: Tensor | None) -> tuple[Tensor | None, ...]:
        reason = "inside transforms of torch.func its kernels have first and second derivatives, but no third ones"
        raise unsupported('impl="auto"', [reason], hint='impl="reference" has all of them')

    @staticmethod
    def vmap(
        info: Any,
        in_dims: tuple[int | None, ...],
        inputs: AttentionInputs,
        dropped: Dropped | None,
        needed: tuple[bool, ...],
        create_graph: bool,
        *rest: Any,
    ) -> tuple[Tensors, tuple[int | None, ...]]:
        size, dims = info.batch_size, in_dims[4:]
        count = (len(rest) - 3) // 2
        results = [into_batch(x, dim, size) for x, dim in zip(rest[:3], dims[:3], strict=True)]
        folded, sources = folded_into_batch(inputs, rest[3 : 3 + count], dims[3 : 3 + count], size)
        _, grads = folded_into_batch(inputs, rest[3 + count :], dims[3 + count :], size)
        folded_dropout = _folded_dropout(dropped, inputs, size)
        derivatives = [
            None if x is None else x.unflatten(0, (size, -1))
            for x in _SecondDerivatives.apply(folded, folded_dropout, needed, create_graph, *results, *sources, *grads)
        ]
        return tuple(derivatives), tuple(None if x is None else 0 for x in derivatives)


def folded_into_batch(
    inputs: AttentionInputs, tensors: tuple[Tensor | None, ...], dims: tuple[int | None, ...], size: int
) -> tuple[AttentionInputs, list[Tensor | None]]:
    """Return the inputs and the source tensors with the axis mapped by `vmap` folded into the batch axis."""
    reasons = []
    if inputs.rule.shape[0] > 1:
        reasons.append("vmap cannot repeat a mask that differs between batch items")
    if inputs.modification is not None:
        reasons.append("vmap cannot pass the batch item to a function of scores")
    elif len(tensors) > 4:
        reasons.append("vmap cannot map parameters of a score's own function")
    if reasons:
        raise unsupported("vmap", reasons, hint="put the mapped axis into the batch yourself")
    folded = [into_batch(x, dim, size) for x, dim in zip(tensors, dims, strict=True)]
    bias = folded[3]
    if bias is not None:  # expand a bias that batch items share, so that each sample has a separate copy
        bias = bias.unflatten(0, (size, -1)).expand(-1, inputs.shape[0], *bias.shape[1:])
        folded[3] = bias.flatten(0, 1)
    batch, *others = inputs.shape
    return inputs.replaced(shape=(size * batch, *others)), folded


def _folded_dropout(dropped: Dropped | None, inputs: AttentionInputs, size: int) -> Dropped | None:
    """Return the dropout settings after `vmap` has folded ``size`` samples into the batch."""
    return None if dropped is None else dropped.folded(inputs.shape[0], size, current_transform_level())


def into_batch(x: Tensor | None, dim: int | None, size: int) -> Tensor | None:
    """Fold axis ``dim``, which `vmap` maps, into the batch axis; if it is None, repeat the tensor ``size`` times."""
    if x is None:
        return None
    x = x.movedim(dim, 0) if dim is not None else x.expand(size, *x.shape)
    return x.flatten(0, 1)
