"""Prefix sums over all earlier keys, which let causal linear attention run in linear time."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from saccade.caches.recurrent import Memory
from saccade.engine.tiles.grouped_heads import product
from saccade.mechanisms.features.chunked_sums import Carried, PairWeights, chunked_sums
from saccade.support.torch_modes import is_one_operation


def prefix_sums(
    a: Tensor, b: Tensor, c: Tensor, pair_weights: PairWeights | None = None, *, reverse: bool = False
) -> Tensor:
    r"""Sum the values of all keys up to each row, weighted by the dot products of the row with the keys.

    .. math:: o_i = \sum_{j \le i} w_{ij} (a_i \cdot b_j)\, c_j

    The sums are differentiable any number of times. Each derivative is again a prefix sum, forwards or backwards, so
    the backward pass stores only the inputs. The weights w are treated as constants.

    Args:
        a: ``[batch, heads, len, width]``.
        b: ``[batch, groups, len, width]``. The number of groups divides the number of heads, or vice versa. In the
            latter case, the sum also runs over the groups that belong to a head.
        c: ``[batch, groups, len, value_dim]``.
        pair_weights: weights and segments; when None, all weights are 1.
        reverse: sum over j >= i instead.

    Returns:
        ``[batch, heads, len, value_dim]``.

    Cost: O(len * (width + value_dim) * CHUNK + len * width * value_dim) time, and memory for one state ``[batch,
    groups, width, value_dim]`` and one chunk in addition to inputs and output.
    """
    pair_weights = PairWeights() if pair_weights is None else pair_weights
    run = _operation if is_one_operation() else _PrefixSums.apply
    return run(a, b, c, *pair_weights, reverse)


def continued(
    a: Tensor, b: Tensor, c: Tensor, pair_weights: PairWeights, memory: Memory | None
) -> tuple[Tensor, Tensor, Carried]:
    """Continue `prefix_sums` after a recurrent state. Return the sums, the new state and its scale."""
    out = prefix_sums(a, b, c, pair_weights)
    if memory is None:
        carried = Carried.nothing(len(a), b.shape[1], a.detach())
        state = a.new_zeros(len(a), b.shape[1], b.shape[3], c.shape[3])
    else:
        state, carried = memory.state, Carried(memory.peaks, memory.segment)
        share = carried.share_of(pair_weights)
        share = share if share.shape[1] == 1 else share.repeat_interleave(a.shape[1] // share.shape[1], 1)
        out = out + product(a, state) * share[..., None]
    if b.shape[2]:
        state, carried = carried.advanced(state, b, c, pair_weights, last=b.shape[2] - 1)
    return out, state, carried


def _run_prefix_sums(
    a: Tensor,
    b: Tensor,
    c: Tensor,
    row_logs: Tensor | None,
    key_logs: Tensor | None,
    segments: Tensor | None,
    reverse: bool,
) -> Tensor:
    return chunked_sums(a, b, c, PairWeights(row_logs, key_logs, segments), reverse=reverse).out


def _save_inputs(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    *tensors, ctx.reverse = inputs
    ctx.save_for_backward(*tensors)


def _derivatives(ctx: Any, grad: Tensor, run: Callable[..., Tensor]) -> tuple[Tensor | None, ...]:
    """Return the gradients of the prefix sums. Each gradient is itself a prefix sum, forwards or backwards."""
    a, b, c, *tensors = ctx.saved_tensors
    pair_weights, reverse, needs_grad = PairWeights(*tensors), ctx.reverse, ctx.needs_input_grad
    transposed = pair_weights.transposed()
    return (
        run(grad, c, b, *pair_weights, reverse) if needs_grad[0] else None,
        run(c, grad, a, *transposed, not reverse) if needs_grad[1] else None,
        run(b, a, grad, *transposed, not reverse) if needs_grad[2] else None,
        *(None, None, None, None),
    )


def _mapped(info: Any, in_dims: tuple[int | None, ...], run: Callable[..., Tensor], *args: Any) -> tuple[Tensor, int]:
    """Run the prefix sums under ``torch.func.vmap``, with the mapped axis folded into the batch."""
    *tensors, reverse = args
    size, dim = info.batch_size, in_dims[0]
    batch = tensors[0].shape[0 if dim is None or dim else 1]
    folded = [
        None if x is None else _into_batch(x, dim_of_x, size, batch)
        for x, dim_of_x in zip(tensors, in_dims[:-1], strict=True)
    ]
    return run(*folded, reverse).unflatten(0, (size, batch)), 0


def _into_batch(x: Tensor, dim: int | None, size: int, batch: int) -> Tensor:
    """Fold the axis that ``torch.func.vmap`` maps over into the batch axis."""
    x = x.expand(size, *x.shape) if dim is None else x.movedim(dim, 0)
    return x.expand(size, batch, *x.shape[2:]).flatten(0, 1)  # segments may be the same for the full batch


class _PrefixSums(torch.autograd.Function):
    """The prefix sums as an autograd function."""

    forward = staticmethod(_run_prefix_sums)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
        _save_inputs(ctx, inputs, output)
        ctx.save_for_forward(*inputs[:-1])

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        return _derivatives(ctx, grad, _PrefixSums.apply)

    @staticmethod
    def jvp(ctx: Any, da: Tensor | None, db: Tensor | None, dc: Tensor | None, *_: None) -> Tensor:
        """Return the forward-mode derivative, which adds one prefix sum for each argument that has a tangent."""
        a, b, c, *pair_weights = ctx.saved_tensors
        terms = ((da, b, c), (a, db, c), (a, b, dc))
        changed = [term for term in terms if all(x is not None for x in term)]
        first, *others = (_PrefixSums.apply(*term, *pair_weights, ctx.reverse) for term in changed)
        return sum(others, first)

    @staticmethod
    def vmap(info: Any, in_dims: tuple[int | None, ...], *args: Any) -> tuple[Tensor, int]:
        return _mapped(info, in_dims, _PrefixSums.apply, *args)


# A custom op, so that a compiler sees one node instead of the operations of every chunk.
_operation = torch.library.custom_op("saccade::prefix_sums", _run_prefix_sums, mutates_args=())
_operation.register_fake(lambda a, b, c, *_: a.new_empty(*a.shape[:3], c.shape[3]))
_operation.register_autograd(lambda ctx, grad: _derivatives(ctx, grad, _operation), setup_context=_save_inputs)
_operation.register_vmap(lambda info, in_dims, *args: _mapped(info, in_dims, _operation, *args))
