"""Matrix products of a recurrence and their gradients: A @ v, which also returns the last state, and A.mT @ x."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from saccade.mechanisms.fake_tensors import is_readable, is_surely_finite
from saccade.mechanisms.recurrences.chunk_group import Group, backwards, forwards, scaled, segment_before, written_by
from saccade.mechanisms.recurrences.recurrence_spec import (
    CHUNK,
    Rule,
    groups_of,
    join_chunks,
    product_by_token,
    split_chunks,
)
from saccade.support.torch_modes import is_one_operation


def product(rule: Rule, value: Tensor, state: Tensor, segment: Tensor | None) -> tuple[Tensor, Tensor]:
    """Return the outputs of a recurrence and its state after the last token. Both are differentiable.

    Args:
        rule: recurrence of the tokens.
        value: ``[sequences, len, value_dim]``, in the dtype of the recurrence.
        state: ``[sequences, head_dim, value_dim]``, the state before the first token.
        segment: int64 ``[sequences]``, the segment that the state belongs to; None without segments.

    Returns:
        The outputs, ``[sequences, len, value_dim]``, and the last state.

    Cost: O(len * (head_dim + value_dim) * CHUNK + len * head_dim * value_dim) time, and memory for one group of chunks
    in addition to inputs and output. The backward pass stores the inputs and one state for each group.
    """
    run = _operation if is_one_operation() else _Product.apply
    out, last, _ = run(*rule.tensors, value, state, segment, rule.scale, rule.is_delta)
    return out, last


def transposed(rule: Rule, x: Tensor, segment: Tensor | None) -> Tensor:
    """Return the transposed product ``A.mT @ x``, computed by running the recurrence from the last token to the first.

    Args:
        rule: recurrence of the tokens.
        x: ``[sequences, rows, width]``, the entries of the last rows; earlier rows are 0.
        segment: as in `product`.
    """
    lines, length, head_dim = rule.key.shape
    out = x.new_zeros(lines, length, x.shape[2])
    state = x.new_zeros(lines, head_dim, x.shape[2])
    first = length - x.shape[1]
    for span in reversed(list(groups_of(length))):
        group = Group.of(rule, span, segment_before(rule, span, segment))
        if span.start >= first:
            part = x[:, span.start - first : span.stop - first]
        else:
            part = x.new_zeros(lines, span.stop - span.start, x.shape[2])
            if span.stop > first:
                part[:, first - span.start :] = x[:, : span.stop - first]
        reached, states = backwards(group, split_chunks(part, slice(None)), state)
        reached = reached if group.beta is None else reached * group.beta
        out[:, span], state = join_chunks(reached, span.stop - span.start), states[0]
    return out


def _run_groups(
    query: Tensor,
    key: Tensor,
    decay: Tensor | None,
    beta: Tensor | None,
    segments: Tensor | None,
    recall: Tensor | None,
    value: Tensor,
    state: Tensor,
    segment: Tensor | None,
    scale: float,
    is_delta: bool,
) -> tuple[Tensor, Tensor, Tensor]:
    """Run a recurrence group by group. Return the outputs, the last state, and the state before each group."""
    rule, spans = Rule(query, key, decay, beta, segments, recall, scale, is_delta), list(groups_of(key.shape[1]))
    out, states = torch.empty_like(value), state.new_empty(len(spans), *state.shape)
    for i, span in enumerate(spans):
        states[i] = state
        read, state = forwards(
            Group.of(rule, span, segment_before(rule, span, segment)), split_chunks(value, span), state
        )
        out[:, span] = join_chunks(read, span.stop - span.start)
    return out, state.clone(), states


def _gradients(
    query: Tensor,
    key: Tensor,
    decay: Tensor | None,
    beta: Tensor | None,
    segments: Tensor | None,
    recall: Tensor | None,
    value: Tensor,
    states: Tensor,
    segment: Tensor | None,
    scale: float,
    is_delta: bool,
    grad: Tensor,
    grad_state: Tensor,
) -> list[Tensor]:
    """Return the gradients of `product` with respect to query, key, decay, beta, recall, value and state.

    The gradient with respect to an argument that is None is an empty tensor.
    """
    rule = Rule(query, key, decay, beta, segments, recall, scale, is_delta)
    given = (query, key, decay, beta, recall, value)
    grads = [query.new_empty(0) if x is None else torch.empty_like(x) for x in given]
    state = grad_state
    for i, span in reversed(list(enumerate(groups_of(key.shape[1])))):
        group = Group.of(rule, span, segment_before(rule, span, segment))
        parts, state = _gradients_of(group, split_chunks(value, span), states[i], split_chunks(grad, span), state)
        for whole, part in zip(grads, parts, strict=True):
            if part is not None:
                whole[:, span] = join_chunks(part, span.stop - span.start)
    if scale != 1.0:
        grads[0] *= scale
    return [*grads, state.clone()]


def _gradients_of(
    group: Group, value: Tensor, state: Tensor, grad: Tensor, grad_state: Tensor
) -> tuple[tuple[Tensor | None, ...], Tensor]:
    """Return a group's gradients with respect to query, key, decay, beta, recall, value and incoming state.

    No exponential is differentiated: the gradient with respect to the summed log decays is ``query * grad_query`` for
    each token that reads, minus ``key * grad_key`` for each token that writes.
    """
    new, states = written_by(group, value, state)
    reached, behind = backwards(group, grad, grad_state)
    before, writes, decays = states[:-1], behind[1:], group.decays
    arrived = reached if group.beta is None else reached * group.beta
    # Queries read the state and, with the delta rule, so do keys. Stack them, so that one product serves both.
    readers, incoming = group.query, grad
    if group.recalled is not None:
        readers, incoming = torch.cat([group.query, group.recall], 2), torch.cat([grad, -arrived], 2)
    pairs = incoming @ new.mT
    pairs[:, :, CHUNK:].tril_(-1)
    read, written = decays.gradients(pairs, readers, group.key)
    carried = (incoming @ before.mT).unflatten(2, (-1, CHUNK))
    starts, firsts = (None if x is None else x[:, :, None] for x in (decays.from_start, group.first))
    read += scaled(carried, starts, firsts).flatten(2, 3)
    query, recalled = read[:, :, :CHUNK], None if group.recalled is None else read[:, :, CHUNK:]
    written += scaled(new @ writes.mT, decays.to_end, group.last)
    beta = None if group.beta is None else (reached * _unweighted(group, value, new, before)).sum(-1, keepdim=True)
    decay = None
    if decays.sums is not None:
        change = group.query * query - group.key * written
        change = change if recalled is None else change + group.recall * recalled
        change[:, :, -1] += (writes * states[1:]).sum(-1)
        change = change if decays.table is None else change.sum(-1, keepdim=True)
        decay = change.flip(2).cumsum(2).flip(2)
    if recalled is not None and group.recall is group.key:
        written, recalled = written + recalled, None
    return (query, written, decay, beta, recalled, arrived), behind[0]


def _unweighted(group: Group, value: Tensor, new: Tensor, before: Tensor) -> Tensor:
    """Return the values that tokens write to the state, before they are multiplied by beta."""
    if group.recalled is None or group.beta is None:
        return value
    if is_readable(group.beta) and bool((group.beta != 0).all()):
        return new / group.beta
    decayed_keys = scaled(group.recall, group.decays.from_start, group.first)
    return value - decayed_keys @ before - group.recalled @ new


def _save_inputs(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor, Tensor]) -> None:
    *tensors, ctx.scale, ctx.is_delta = inputs
    query, key, decay, beta, segments, recall, value, state, segment = tensors
    ctx.save_for_backward(query, key, decay, beta, segments, recall, value, output[2], segment, state)
    if hasattr(ctx, "mark_non_differentiable"):
        ctx.mark_non_differentiable(output[2])


def _derivatives(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
    grad, grad_state, _ = grads
    if torch.is_grad_enabled() and not is_one_operation():
        return _differentiable(ctx, grad, grad_state)
    bad = None if is_surely_finite(grad) else ~grad.isfinite().all(-1, keepdim=True)
    grad = grad if bad is None else grad.masked_fill(bad, 0.0)
    saved: tuple[Any, ...] = (*ctx.saved_tensors[:9], ctx.scale, ctx.is_delta, grad, grad_state)
    run: Any = _gradient_operation if is_one_operation() else _gradients
    query, key, decay, beta, recall, value, state = run(*saved)
    if bad is not None:
        query = query.masked_fill(bad, math.nan)
        some = [key, decay, beta, recall, value]
        key, decay, beta, recall, value, state = _mark_nan(bad, saved[4], some, state, saved[8])
    gates = ((saved[2], decay), (saved[3], beta), (saved[5], recall))
    decay, beta, recall = (None if x is None else grad_of_gate for x, grad_of_gate in gates)
    return query, key, decay, beta, None, recall, value, state, None, None, None


def _differentiable(ctx: Any, grad: Tensor, grad_state: Tensor) -> tuple[Tensor | None, ...]:
    """Return differentiable gradients of `product`, computed token by token with every state stored."""
    query, key, decay, beta, segments, recall, value, _, segment, state = ctx.saved_tensors
    rule = Rule(query, key, decay, beta, segments, recall, ctx.scale, ctx.is_delta)
    given = (query, key, decay, beta, recall, value, state)
    leaves = [x for x in given if x is not None and x.requires_grad]
    pairs = zip(product_by_token(rule, value, state, segment), (grad, grad_state), strict=True)
    outs, weights = zip(*(pair for pair in pairs if pair[0].requires_grad), strict=True)  # the state ignores queries
    computed = iter(torch.autograd.grad(outs, leaves, weights, create_graph=True, allow_unused=True))
    grads = [next(computed) if x is not None and x.requires_grad else None for x in given]
    return (*grads[:4], None, *grads[4:], None, None, None)


def _mark_nan(
    bad: Tensor, segments: Tensor | None, grads: list[Tensor], state: Tensor, segment: Tensor | None
) -> list[Tensor]:
    """Set gradients to NaN for the state and for every token on which a row with a non-finite gradient depends."""
    marks = bad.flip(1).int().cumsum(1).flip(1)  # number of such rows from each token on
    before = marks[:, :1, 0] > 0
    if segments is not None and segment is not None:
        behind = torch.arange(segments.shape[1], device=bad.device) + 1
        ends = torch.where(F.pad(segments[:, 1:] != segments[:, :-1], (0, 1), value=True), behind, behind[-1:])
        ends = ends.flip(1).cummin(1).values.flip(1)  # where the segment of each token ends
        marks = marks - F.pad(marks, (0, 0, 0, 1)).gather(1, ends[..., None])
        before = (marks[:, :1, 0] > 0) & (segments[:, :1] == segment[:, None])
    grads = [x.masked_fill(marks > 0, math.nan) if x.numel() else x for x in grads]
    return [*grads, state.masked_fill(before[..., None], math.nan)]


class _Product(torch.autograd.Function):
    """The product of a recurrence as an autograd function."""

    forward = staticmethod(_run_groups)
    setup_context = staticmethod(_save_inputs)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        return _derivatives(ctx, *grads)


def _like(x: Tensor | None, other: Tensor) -> Tensor:
    return other.new_empty(0) if x is None else torch.empty_like(x)


# A custom op, so that a compiler sees one node.
_operation = torch.library.custom_op("saccade::recurrence", _run_groups, mutates_args=())
_gradient_operation = torch.library.custom_op("saccade::recurrence_gradients", _gradients, mutates_args=())


@_operation.register_fake
def _(query: Tensor, key: Tensor, decay, beta, segments, recall, value: Tensor, state: Tensor, *_: Any):  # type: ignore
    groups = len(list(groups_of(key.shape[1])))
    return torch.empty_like(value), torch.empty_like(state), state.new_empty(groups, *state.shape)


@_gradient_operation.register_fake
def _(query: Tensor, key: Tensor, decay, beta, segments, recall, value: Tensor, kept: Tensor, *_: Any):  # type: ignore
    return [*(_like(x, query) for x in (query, key, decay, beta, recall, value)), kept.new_empty(kept.shape[1:])]


_operation.register_autograd(_derivatives, setup_context=_save_inputs)
