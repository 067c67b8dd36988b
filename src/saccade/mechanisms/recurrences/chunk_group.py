"""A group of chunks of a recurrence, with precomputed tensors that do not depend on the incoming state."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from saccade.mechanisms.recurrences.decays import Decays
from saccade.mechanisms.recurrences.recurrence_spec import CHUNK, Rule, split_chunks


class Group(NamedTuple):
    """Several chunks of a recurrence and their precomputed tensors, ``[chunks, sequences, CHUNK, width]`` each.

    From the incoming state S, a chunk computes the values u to write, the outputs o and the outgoing state S':

        u = T (beta v - beta K~ S)     o = Q~ S + P u     S' = e S + W^T u

    Let b be the log decays, summed from the start of the chunk.

    Attributes:
        query, key: queries, multiplied by the scale, and keys.
        recall: the keys with which tokens read the state to correct it; ``key`` unless the recurrence has separate
            ones.
        beta: the strength with which each token is written; None for 1.
        decays: the decays exp(b_i - b_j), and which pairs of tokens are allowed.
        weights: P, the weights of tokens in the same chunk for each query.
        recalled: the weights of earlier tokens in the chunk for each recalling key; None without the delta rule.
        inverse: T, the inverse of 1 + beta * recalled; None without the delta rule.
        reads: Q~, queries times the decay since the start of the chunk.
        recalls: ``-beta K~``, where K~ are recalling keys times the decay since the start; None without the delta rule.
        writes: W, keys times the decay up to the end of the chunk.
        keeps: e, the share of the incoming state that remains at the end, ``[chunks, sequences, 1 | head_dim, 1]``.
        first, last: 1 for tokens that read the incoming state (first) or write to the outgoing state (last), 0 for all
            others, ``[chunks, sequences, CHUNK, 1]``; None if they are 1 for all tokens.
    """

    query: Tensor
    key: Tensor
    recall: Tensor
    beta: Tensor | None
    decays: Decays
    weights: Tensor
    recalled: Tensor | None
    inverse: Tensor | None
    reads: Tensor
    recalls: Tensor | None
    writes: Tensor
    keeps: Tensor
    first: Tensor | None
    last: Tensor | None

    @classmethod
    def of(cls, rule: Rule, span: slice, segment: Tensor | None) -> Group:
        """Precompute the tensors of a recurrence for a range of tokens.

        Args:
            rule: the recurrence of the full sequences.
            span: the range of tokens.
            segment: int64 ``[sequences]``, the segment of the incoming state; None without segments.
        """
        dtype = rule.query.dtype
        query, key = split_chunks(rule.query, span), split_chunks(rule.key, span)
        recall = key if rule.recall is None else split_chunks(rule.recall, span)
        query = query if rule.scale == 1.0 else query * rule.scale
        beta = None if rule.beta is None else split_chunks(rule.beta, span)
        allowed = torch.ones(CHUNK, CHUNK, dtype=torch.bool, device=key.device).tril_()
        first = last = None
        if rule.segments is not None and segment is not None:
            allowed, first, last, is_one = _split_segments(rule.segments[:, span], segment, allowed, dtype)
        decays = Decays.of(
            None if rule.decay is None else split_chunks(rule.decay, span, torch.float64), allowed, dtype
        )
        keeps = decays.kept(key)
        keeps = keeps if first is None else keeps * is_one
        reads, writes = scaled(query, decays.from_start, first), scaled(key, decays.to_end, last)
        if not rule.is_delta:
            weights = decays.products(query, key)
            return cls(query, key, recall, beta, decays, weights, None, None, reads, None, writes, keeps, first, last)
        weights, recalled = _pair_weights(decays, query, key, recall)
        inverse = recalled if beta is None else recalled * beta
        eye = torch.eye(CHUNK, dtype=dtype, device=key.device).expand_as(inverse)
        inverse = torch.linalg.solve_triangular(inverse, eye, upper=False, unitriangular=True)
        back = scaled(recall, decays.from_start, first)
        recalls = -back if beta is None else back * -beta
        pairs = (weights, recalled, inverse)
        return cls(query, key, recall, beta, decays, *pairs, reads, recalls, writes, keeps, first, last)

    @property
    def chunks(self) -> int:
        """Number of chunks in the group, which are computed together."""
        return self.key.shape[0]


def scaled(x: Tensor, factor: Tensor | None, marks: Tensor | None) -> Tensor:
    """Multiply tokens of a chunk by two optional factors, where None stands for 1."""
    x = x if factor is None else x * factor
    return x if marks is None else x * marks


def _pair_weights(decays: Decays, query: Tensor, key: Tensor, recall: Tensor) -> tuple[Tensor, Tensor]:
    """Return the weights of earlier keys in a chunk for each query and, with the delta rule, for each recalling key."""
    if decays.table is None and decays.sums is not None:
        return decays.products(query, key), decays.products(recall, key).tril_(-1)
    both = decays.products(torch.cat([query, recall], 2), key)
    return both[:, :, :CHUNK], both[:, :, CHUNK:].tril(-1)


def forwards(group: Group, value: Tensor, state: Tensor) -> tuple[Tensor, Tensor]:
    """Run a group of chunks. Return the outputs ``[chunks, sequences, CHUNK, value_dim]`` and the outgoing state.

    Args:
        group: the chunks.
        value: ``[chunks, sequences, CHUNK, value_dim]``.
        state: the incoming state, ``[sequences, head_dim, value_dim]``.
    """
    new, states = written_by(group, value, state)
    return _chunk_product(group.weights, new).add_(_chunk_product(group.reads, states[:-1])), states[-1]


def written_by(group: Group, value: Tensor, state: Tensor) -> tuple[Tensor, Tensor]:
    """Return u, the values that a group of chunks writes to the state, and the state at each chunk boundary.

    There is one state before each chunk and one after the last.
    """
    new = value if group.beta is None else value * group.beta
    states = state.new_empty(group.chunks + 1, *state.shape)
    states[0] = state
    if group.inverse is None or group.recalls is None:
        products = _chunk_product(group.writes.mT, new)
        for i in range(group.chunks):
            torch.addcmul(products[i], states[i], group.keeps[i].expand_as(state), out=states[i + 1])
        return new, states
    new = new if group.beta is not None else new.clone()
    for i in range(group.chunks):
        torch.bmm(group.inverse[i], torch.baddbmm(new[i], group.recalls[i], states[i]), out=new[i])
        torch.baddbmm(states[i] * group.keeps[i], group.writes[i].mT, new[i], out=states[i + 1])
    return new, states


def backwards(group: Group, x: Tensor, state: Tensor) -> tuple[Tensor, Tensor]:
    """Run a group of chunks backwards. Return the gradients with respect to the values u and to the states.

    Args:
        group: the chunks.
        x: ``[chunks, sequences, CHUNK, width]``, the gradient with respect to the outputs.
        state: ``[sequences, head_dim, width]``, the gradient with respect to the outgoing state.

    Returns:
        The gradient with respect to u, with the shape of x, and the gradients with respect to the states before the
        first chunk and after each chunk, ``[chunks + 1, sequences, head_dim, width]``.
    """
    states = state.new_empty(group.chunks + 1, *state.shape)
    states[group.chunks] = state
    reached, products = _chunk_product(group.weights.mT, x), _chunk_product(group.reads.mT, x)
    if group.inverse is None or group.recalls is None:
        for i in reversed(range(group.chunks)):
            torch.addcmul(products[i], states[i + 1], group.keeps[i].expand_as(state), out=states[i])
        return reached.add_(_chunk_product(group.writes, states[1:])), states
    for i in reversed(range(group.chunks)):
        new = torch.baddbmm(reached[i], group.writes[i], states[i + 1])
        torch.bmm(group.inverse[i].mT, new, out=reached[i])
        carried = torch.addcmul(products[i], states[i + 1], group.keeps[i].expand_as(state))
        torch.baddbmm(carried, group.recalls[i].mT, reached[i], out=states[i])
    return reached, states


def segment_before(rule: Rule, span: slice, segment: Tensor | None) -> Tensor | None:
    """Return the segment of the token before a range of tokens, or ``segment`` if there is no such token."""
    if rule.segments is None or span.start == 0:
        return segment
    return rule.segments[:, span.start - 1]


def _split_segments(
    segments: Tensor, segment: Tensor, allowed: Tensor, dtype: torch.dtype
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Mark where segments begin and end within the chunks of a recurrence.

    Return which pairs are within one segment, which tokens are in the segment of the incoming state, which tokens are
    in the last segment of their chunk, and which chunks end in the segment of their incoming state.
    """
    missing = -segments.shape[1] % CHUNK
    whole = torch.cat([segments, segments[:, -1:].expand(-1, missing)], 1) if missing else segments
    before = torch.cat([segment[:, None], whole], 1)[:, :-1:CHUNK].mT  # [chunks, sequences]
    in_chunks = whole.unflatten(1, (-1, CHUNK)).transpose(0, 1)  # [chunks, sequences, CHUNK]
    first, last = in_chunks == before[..., None], in_chunks == in_chunks[..., -1:]
    keeps = in_chunks[..., -1] == before
    pairs = (in_chunks[..., :, None] == in_chunks[..., None, :]) & allowed
    return pairs, first[..., None].to(dtype), last[..., None].to(dtype), keeps[..., None, None].to(dtype)


def _chunk_product(a: Tensor, b: Tensor) -> Tensor:
    """Multiply the matrices of all chunks in one batched call."""
    return torch.bmm(a.flatten(0, 1), b.flatten(0, 1)).unflatten(0, a.shape[:2])
