"""What all kernels share: a product as a differentiable function, in which NaN and inf stay where they may be seen."""

from __future__ import annotations

import math
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor

from saccade.engine.guard import is_clean, isolate
from saccade.engine.ingredients import ScoreMatrix
from saccade.errors import unsupported
from saccade.transforms import is_transformed

__all__ = ["NO_FORWARD_DERIVATIVES", "Backward", "Dropped", "Kernel", "Tensors", "gradients", "outcome", "run"]

NO_FORWARD_DERIVATIVES = "its derivatives are taken backwards, and here they are taken forwards"

Tensors = tuple[Tensor | None, ...]
"""Query, key, value, the bias's source and the score's parameters, or their gradients."""


class Dropped(NamedTuple):
    """Which weights a product leaves out."""

    p: float
    seed: int


class Backward(NamedTuple):
    """What a backward pass starts from; the lse is +inf where a row sees nothing, so that its weights are 0."""

    out: Tensor
    lse: Tensor
    grad_out: Tensor
    grad_lse: Tensor | None


class Kernel(Protocol):
    """How a product is executed; forward and backward know nothing of autograd, and inputs are as they should be."""

    name: str

    def forward(self, scores: ScoreMatrix, value: Tensor, dropped: Dropped | None) -> tuple[Tensor, Tensor]:
        """Output and lse."""
        ...

    def backward(
        self, scores: ScoreMatrix, value: Tensor, dropped: Dropped | None, given: Backward, wanted: tuple[bool, ...]
    ) -> Tensors:
        """Gradients of what is wanted, None for the rest."""
        ...


def run(kernel: Kernel, scores: ScoreMatrix, value: Tensor, dropped: Dropped | None) -> tuple[Tensor, Tensor]:
    """Output ``[batch, heads, q_len, value_dim]`` and lse ``[batch, heads, q_len]``, both differentiable."""
    tensors = scores.sources(value)
    if is_transformed() or (torch.is_grad_enabled() and any(x is not None and x.requires_grad for x in tensors)):
        try:
            return _Product.apply(kernel, scores.detached(), dropped, *tensors)
        except RuntimeError as error:
            if isinstance(error, NotImplementedError) or not (is_transformed() and scores.rule.asks_functions):
                raise
            # By now the mapped axis is part of the batch, and a tensor that the function holds on to is not.
            reason = "the function that is the mask could not be called; it may read a tensor that is mapped"
            hint = "pass what it reads as part of the mask, e.g. masks.Dense for each batch item, outside of vmap"
            raise unsupported(scores.where, "vmap", [reason], hint=hint) from error
    return outcome(kernel, scores, value, dropped)


def outcome(kernel: Kernel, scores: ScoreMatrix, value: Tensor, dropped: Dropped | None) -> tuple[Tensor, Tensor]:
    """The forward pass."""
    out, lse = kernel.forward(scores, value, dropped)
    # Where the output is finite, nothing that is not has had a part in it.
    isolated = None if is_clean(scores, out) else isolate(scores, value)
    if isolated is not None:
        return isolated.mark(*kernel.forward(isolated.scores, isolated.value, dropped))
    return out, lse


def gradients(
    kernel: Kernel,
    scores: ScoreMatrix,
    value: Tensor,
    dropped: Dropped | None,
    given: Backward,
    wanted: tuple[bool, ...],
) -> Tensors:
    """The backward pass."""
    # A finite output does not say that what is hidden was: here 0 * NaN and 0 * inf would spread from there.
    # Nor do finite inputs: a bias may be NaN where it is seen, and then all weights of the row are.
    spoilt = given.lse.isnan()
    known = is_clean(scores, scores.query, scores.key, value) and (scores.plan.is_full or not bool(spoilt.any()))
    isolated = None if known else isolate(scores, value, spoilt)
    if isolated is None:
        return _gradients(kernel, scores, value, dropped, given, wanted)
    out, lse = kernel.forward(isolated.scores, isolated.value, dropped)
    # The results of the queries concerned are NaN, whatever the inputs are.
    grad_lse = None if given.grad_lse is None else given.grad_lse.masked_fill(isolated.in_scores, 0.0)
    given = Backward(out, lse, given.grad_out.masked_fill(isolated.in_output[..., None], 0.0), grad_lse)
    return _gradients(kernel, isolated.scores, isolated.value, dropped, given, wanted)


def _gradients(
    kernel: Kernel,
    scores: ScoreMatrix,
    value: Tensor,
    dropped: Dropped | None,
    given: Backward,
    wanted: tuple[bool, ...],
) -> Tensors:
    empty = given.lse == -math.inf
    if bool(empty.any()):  # a row that sees nothing cannot be moved, not even by NaN
        lse, grad_out = given.lse.masked_fill(empty, math.inf), given.grad_out.masked_fill(empty[..., None], 0.0)
        grad_lse = None if given.grad_lse is None else given.grad_lse.masked_fill(empty, 0.0)
        given = Backward(given.out, lse, grad_out, grad_lse)
    return kernel.backward(scores, value, dropped, given, wanted)


class _Product(torch.autograd.Function):
    @staticmethod
    def forward(
        kernel: Kernel, scores: ScoreMatrix, dropped: Dropped | None, *tensors: Tensor | None
    ) -> tuple[Tensor, Tensor]:
        scores, value = scores.of(tensors)
        return outcome(kernel, scores, value, dropped)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
        ctx.kernel, ctx.scores, ctx.dropped, *tensors = inputs
        ctx.save_for_backward(*tensors, *output, *ctx.scores.rule.tensors())
        ctx.count = len(tensors)
        ctx.set_materialize_grads(False)

    @staticmethod
    def backward(ctx: Any, grad_out: Tensor | None, grad_lse: Tensor | None) -> tuple[Tensor | None, ...]:
        # Unpacking also raises if a mask was changed in place since the forward pass.
        saved = ctx.saved_tensors
        tensors, (out, lse) = saved[: ctx.count], saved[ctx.count : ctx.count + 2]
        if grad_out is None and grad_lse is None:
            return (None,) * (ctx.count + 3)
        grad_out = torch.zeros_like(out) if grad_out is None else grad_out
        wanted = ctx.needs_input_grad[3:]
        given = (out, lse, grad_out, grad_lse)
        grads = _Gradients.apply(ctx.kernel, ctx.scores, ctx.dropped, wanted, *given, *tensors)
        return None, None, None, *grads

    @staticmethod
    def vmap(
        info: Any,
        in_dims: tuple[int | None, ...],
        kernel: Kernel,
        scores: ScoreMatrix,
        dropped: Dropped | None,
        *rest: Any,
    ) -> tuple[tuple[Tensor, Tensor], tuple[int, int]]:
        """The mapped axis becomes part of the batch."""
        size = info.batch_size
        folded, tensors = _folded(scores, rest, in_dims[3:], size)
        out, lse = _Product.apply(kernel, folded, dropped, *tensors)
        return (out.unflatten(0, (size, -1)), lse.unflatten(0, (size, -1))), (0, 0)


class _Gradients(torch.autograd.Function):
    """The backward pass, as a function of its own so that asking for its derivative is an error, not a silence."""

    @staticmethod
    def forward(
        kernel: Kernel,
        scores: ScoreMatrix,
        dropped: Dropped | None,
        wanted: tuple[bool, ...],
        *tensors: Any,
    ) -> Tensors:
        given, sources = Backward(*tensors[:4]), tensors[4:]
        scores, value = scores.of(sources)
        grads = gradients(kernel, scores, value, dropped, given, wanted)
        return tuple(
            None if grad is None or x is None else grad.to(x.dtype) for grad, x in zip(grads, sources, strict=True)
        )

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Tensors) -> None:
        del output
        ctx.name = inputs[0].name

    @staticmethod
    def backward(ctx: Any, *grads: Tensor | None) -> tuple[Tensor | None, ...]:
        del grads
        reason = "it computes gradients itself, and not those of gradients"
        hint = 'impl="reference" has second derivatives'
        raise unsupported("attention", f'impl="{ctx.name}"', [reason], hint=hint)

    @staticmethod
    def vmap(
        info: Any,
        in_dims: tuple[int | None, ...],
        kernel: Kernel,
        scores: ScoreMatrix,
        dropped: Dropped | None,
        wanted: tuple[bool, ...],
        *rest: Any,
    ) -> tuple[Tensors, tuple[int | None, ...]]:
        size = info.batch_size
        given = [_into_batch(x, dim, size) for x, dim in zip(rest[:4], in_dims[4:8], strict=True)]
        folded, tensors = _folded(scores, rest[4:], in_dims[8:], size)
        grads = [
            None if x is None else x.unflatten(0, (size, -1))
            for x in _Gradients.apply(kernel, folded, dropped, wanted, *given, *tensors)
        ]
        bias = scores.sources(rest[6])[3]
        if grads[3] is not None and bias is not None and bias.shape[0] == 1:
            grads[3] = grads[3].sum(1, keepdim=True)
        return tuple(grads), tuple(None if x is None else 0 for x in grads)


def _folded(
    scores: ScoreMatrix, tensors: tuple[Tensor | None, ...], dims: tuple[int | None, ...], size: int
) -> tuple[ScoreMatrix, list[Tensor | None]]:
    """A score matrix with the mapped axis in its batch, and its sources so."""
    reasons = []
    if scores.rule.shape[0] > 1:
        reasons.append("vmap cannot repeat a mask that tells batch items apart")
    if len(tensors) > 4:
        reasons.append("vmap cannot map parameters of a score's own function")
    if reasons:
        raise unsupported(scores.where, "vmap", reasons, hint="put the mapped axis into the batch yourself")
    folded = [_into_batch(x, dim, size) for x, dim in zip(tensors, dims, strict=True)]
    bias = folded[3]
    if bias is not None:  # one for all batch items becomes one for each, so that every mapped one has its own
        bias = bias.unflatten(0, (size, -1)).expand(-1, scores.shape[0], *bias.shape[1:])
        folded[3] = bias.flatten(0, 1)
    return scores.repeated(size), folded


def _into_batch(x: Tensor | None, dim: int | None, size: int) -> Tensor | None:
    if x is None:
        return None
    x = x.movedim(dim, 0) if dim is not None else x.expand(size, *x.shape)
    return x.flatten(0, 1)
