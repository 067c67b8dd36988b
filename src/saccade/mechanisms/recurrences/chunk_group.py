"""A group of chunks of a recurrence, with everything precomputed that does not need the incoming state."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from saccade.mechanisms.recurrences.decays import Decays
from saccade.mechanisms.recurrences.recurrence_spec import CHUNK, Rule, cut


class Group(NamedTuple):
    """Several chunks of a recurrence, ``[chunks, lines, CHUNK, width]`` each, and their precomputed factors.

    Within a chunk, where S comes in, b are log decays summed from its start, and b_C all of them:

        u = T (beta v - beta K~ S)     o = Q~ S + P u     S' = e S + K^T u

    Attributes:
        query, key: as the rule has them; the query times its scale.
        beta: None for 1.
        decays: exp(b_i - b_j), and the allowed pairs.
        weights: P, the weights with which queries read tokens of the chunk.
        recalled: the weights with which keys recall one another, strictly below the diagonal; None without the delta
            rule.
        inverse: T, of 1 + beta * recalled; None without the delta rule.
        reads: Q~, queries with the decay since the start of the chunk.
        recalls: ``-beta K~``, keys with the same decay; None without the delta rule.
        writes: K^, keys with the decay up to the end of the chunk.
        keeps: e, the share of the incoming state that is left: ``[chunks, lines, 1 | head_dim, 1]``.
        first, last: tokens that read the incoming state, and that write to the outgoing one,
            ``[chunks, lines, CHUNK, 1]`` of 0 and 1; None for all.
    """

    query: Tensor
    key: Tensor
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
        """Precompute the chunks of some tokens.

        Args:
            rule: recurrence of the whole line.
            span: the tokens.
            segment: int64 ``[lines]``, of the state that comes in; None where there are no segments.
        """
        dtype = rule.query.dtype
        query, key = cut(rule.query, span), cut(rule.key, span)
        query = query if rule.scale == 1.0 else query * rule.scale
        beta = None if rule.beta is None else cut(rule.beta, span)
        allowed = torch.ones(CHUNK, CHUNK, dtype=torch.bool, device=key.device).tril_()
        first = last = None
        if rule.segments is not None and segment is not None:
            allowed, first, last, is_one = _split_segments(rule.segments[:, span], segment, allowed, dtype)
        decays = Decays.of(None if rule.decay is None else cut(rule.decay, span, torch.float64), allowed, dtype)
        keeps = decays.kept(key)
        keeps = keeps if first is None else keeps * is_one
        reads, writes = scaled(query, decays.from_start, first), scaled(key, decays.to_end, last)
        if not rule.is_delta:
            weights = decays.products(query, key)
            return cls(query, key, beta, decays, weights, None, None, reads, None, writes, keeps, first, last)
        weights, recalled = _pair_weights(decays, query, key)
        inverse = recalled if beta is None else recalled * beta
        eye = torch.eye(CHUNK, dtype=dtype, device=key.device).expand_as(inverse)
        inverse = torch.linalg.solve_triangular(inverse, eye, upper=False, unitriangular=True)
        back = scaled(key, decays.from_start, first)
        recalls = -back if beta is None else back * -beta
        return cls(query, key, beta, decays, weights, recalled, inverse, reads, recalls, writes, keeps, first, last)

    @property
    def chunks(self) -> int:
        """The number of chunks."""
        return self.key.shape[0]


def scaled(x: Tensor, factor: Tensor | None, marks: Tensor | None) -> Tensor:
    """Multiply a tensor by two optional factors; None counts as 1."""
    x = x if factor is None else x * factor
    return x if marks is None else x * marks


def _pair_weights(decays: Decays, query: Tensor, key: Tensor) -> tuple[Tensor, Tensor]:
    """Return the weights of earlier keys for queries, and for keys (which the delta rule needs)."""
    if decays.table is None and decays.sums is not None:
        return decays.products(query, key), decays.products(key, key).tril_(-1)
    both = decays.products(torch.cat([query, key], 2), key)
    return both[:, :, :CHUNK], both[:, :, CHUNK:].tril(-1)


def forwards(group: Group, value: Tensor, state: Tensor) -> tuple[Tensor, Tensor]:
    """Run a group of chunks: return outputs like the value, ``[chunks, lines, CHUNK, value_dim]``, and the next state.

    Args:
        group: the chunks.
        value: ``[chunks, lines, CHUNK, value_dim]``.
        state: ``[lines, head_dim, value_dim]``, that comes in.
    """
    new, states = written_by(group, value, state)
    return _chunk_product(group.weights, new).add_(_chunk_product(group.reads, states[:-1])), states[-1]


def written_by(group: Group, value: Tensor, state: Tensor) -> tuple[Tensor, Tensor]:
    """Return what each token writes to the state, u, like the value, and the state before each chunk and at the end.

    The states are those before each chunk and after the last.
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
    """Run a group of chunks backwards: return the gradient of what each token writes, and the transposed states.

    Args:
        group: the chunks.
        x: ``[chunks, lines, CHUNK, width]``, one for each output.
        state: ``[lines, head_dim, width]``, incoming from the end.

    Returns:
        r like x; states ``[chunks + 1, lines, head_dim, width]``: before the first chunk, and after each.
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


def after(rule: Rule, span: slice, segment: Tensor | None) -> Tensor | None:
    """Return the segment of the state before some tokens, if the sequence begins within ``segment``."""
    if rule.segments is None or span.start == 0:
        return segment
    return rule.segments[:, span.start - 1]


def _split_segments(
    segments: Tensor, segment: Tensor, allowed: Tensor, dtype: torch.dtype
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Return a chunk's pairs within one segment, the tokens of its first and last segment, and if it has only one."""
    missing = -segments.shape[1] % CHUNK
    whole = torch.cat([segments, segments[:, -1:].expand(-1, missing)], 1) if missing else segments
    before = torch.cat([segment[:, None], whole], 1)[:, :-1:CHUNK].mT  # [chunks, lines]
    in_chunks = whole.unflatten(1, (-1, CHUNK)).transpose(0, 1)  # [chunks, lines, CHUNK]
    first, last = in_chunks == before[..., None], in_chunks == in_chunks[..., -1:]
    keeps = in_chunks[..., -1] == before
    pairs = (in_chunks[..., :, None] == in_chunks[..., None, :]) & allowed
    return pairs, first[..., None].to(dtype), last[..., None].to(dtype), keeps[..., None, None].to(dtype)


def _chunk_product(a: Tensor, b: Tensor) -> Tensor:
    """Multiply matrices chunk by chunk, in one call for all of them."""
    return torch.bmm(a.flatten(0, 1), b.flatten(0, 1)).unflatten(0, a.shape[:2])
