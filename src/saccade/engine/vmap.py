"""Support for `vmap`: functions that read tensor values run once, with all samples folded into the batch."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from saccade.engine.autograd import folded_into_batch, into_batch
from saccade.engine.inputs import AttentionInputs
from saccade.support.errors import unsupported
from saccade.support.torch_modes import is_mapped

BatchFunction = Callable[..., tuple[Tensor, ...]]


def are_mapped(inputs: AttentionInputs, *others: Tensor) -> bool:
    """Return whether `vmap` maps any of the tensors. If so, tensor values cannot be read."""
    return any(is_mapped(x) for x in (*inputs.leaves, *others))


def of_all_samples(inputs: AttentionInputs, function: BatchFunction, *others: Tensor) -> tuple[Tensor, ...]:
    """Evaluate ``function(inputs, *others)`` once for all samples of `vmap`, which are folded into the batch.

    Args:
        inputs: the checked inputs.
        function: a function that returns tensors whose first axis is the batch.
        others: further tensors for the function, whose first axis is the batch.

    Cost: with gradients, the function is evaluated again in the backward pass.
    """
    if inputs.sink_logit is not None and is_mapped(inputs.sink_logit):
        reason = "vmap cannot map the sink logits, which all batch items share"
        raise unsupported("vmap", [reason], hint="put the mapped axis into the heads")
    sources = inputs.sources(inputs.key)  # a value is not needed
    return _OfAllSamples.apply(function, inputs.emptied(), len(others), *others, *sources)


def _evaluate(
    function: BatchFunction, inputs: AttentionInputs, count: int, *tensors: Tensor | None
) -> tuple[Tensor, ...]:
    full, _ = inputs.of_sources(tensors[count:])
    return function(full, *tensors[:count])


def _fold_samples(
    inputs: AttentionInputs, count: int, tensors: tuple[Tensor | None, ...], dims: tuple[int | None, ...], size: int
) -> tuple[AttentionInputs, list[Tensor | None]]:
    """Fold the samples of `vmap` into the batch axis of the inputs and of all tensors."""
    folded, sources = folded_into_batch(inputs, tensors[count:], dims[count:], size)
    others = [into_batch(x, dim, size) for x, dim in zip(tensors[:count], dims[:count], strict=True)]
    return folded, [*others, *sources]


class _OfAllSamples(torch.autograd.Function):
    """Autograd function that calls a function once under `vmap`, with all samples as a single batch."""

    forward = staticmethod(_evaluate)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
        ctx.function, ctx.inputs, ctx.count, *tensors = inputs
        ctx.save_for_backward(*tensors)
        ctx.mark_non_differentiable(*(x for x in output if not x.is_floating_point()))

    @staticmethod
    def backward(ctx: Any, *grads: Tensor | None) -> tuple[Tensor | None, ...]:
        gradients = _BackwardOfAllSamples.apply(
            ctx.function, ctx.inputs, ctx.count, len(grads), *grads, *ctx.saved_tensors
        )
        return None, None, None, *gradients

    @staticmethod
    def vmap(
        info: Any,
        in_dims: tuple[int | None, ...],
        function: BatchFunction,
        inputs: AttentionInputs,
        count: int,
        *tensors: Any,
    ) -> tuple[tuple[Tensor, ...], tuple[int, ...]]:
        size = info.batch_size
        folded, folded_tensors = _fold_samples(inputs, count, tensors, in_dims[3:], size)
        results = _OfAllSamples.apply(function, folded, count, *folded_tensors)
        return tuple(x.unflatten(0, (size, -1)) for x in results), (0,) * len(results)


class _BackwardOfAllSamples(torch.autograd.Function):
    """Autograd function for the backward pass of `_OfAllSamples`."""

    @staticmethod
    def forward(
        function: BatchFunction, inputs: AttentionInputs, count: int, num_grads: int, *rest: Tensor | None
    ) -> tuple[Tensor | None, ...]:
        grads, tensors = rest[:num_grads], rest[num_grads:]
        leaves = [None if x is None else x.detach().requires_grad_(x.is_floating_point()) for x in tensors]
        with torch.enable_grad():
            results = _evaluate(function, inputs, count, *leaves)
        pairs = [(x, grad) for x, grad in zip(results, grads, strict=True) if grad is not None and x.requires_grad]
        wanted = [x for x in leaves if x is not None and x.requires_grad]
        if not pairs:
            return (None,) * len(leaves)
        gradients = iter(
            torch.autograd.grad([x for x, _ in pairs], wanted, [grad for _, grad in pairs], allow_unused=True)
        )
        return tuple(next(gradients) if x is not None and x.requires_grad else None for x in leaves)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor | None, ...]) -> None:
        pass

    @staticmethod
    def backward(ctx: Any, *grads: Tensor | None) -> tuple[Tensor | None, ...]:
        reason = "methods of a matrix have only first derivatives under vmap"
        raise unsupported("vmap", [reason], hint="sc.attention also has second derivatives under vmap")

    @staticmethod
    def vmap(
        info: Any,
        in_dims: tuple[int | None, ...],
        function: BatchFunction,
        inputs: AttentionInputs,
        count: int,
        num_grads: int,
        *rest: Any,
    ) -> tuple[tuple[Tensor | None, ...], tuple[int | None, ...]]:
        size, dims = info.batch_size, in_dims[4:]
        grads = [into_batch(x, dim, size) for x, dim in zip(rest[:num_grads], dims[:num_grads], strict=True)]
        folded, folded_tensors = _fold_samples(inputs, count, rest[num_grads:], dims[num_grads:], size)
        results = _BackwardOfAllSamples.apply(function, folded, count, num_grads, *grads, *folded_tensors)
        return (
            tuple(None if x is None else x.unflatten(0, (size, -1)) for x in results),
            tuple(None if x is None else 0 for x in results),
        )
