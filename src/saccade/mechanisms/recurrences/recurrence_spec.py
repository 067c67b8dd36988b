"""Rule: the tensors of a recurrence, its division into chunks, and its definition token by token."""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn import functional as F

CHUNK = 32  # number of tokens in a chunk with dense weights: a trade-off between small tables and fast products
GROUP = 256  # number of tokens in a group of chunks, prepared together; the backward pass stores one state per group


class Rule(NamedTuple):
    r"""The tensors that define a recurrence over a sequence, with a state S ``[head_dim, value_dim]``.

    .. math:: S_t = D_t S_{t-1} + k_t u_t^T, \qquad o_t = s\, S_t^T q_t, \qquad D_t = \mathrm{diag}(\exp g_t)

    with :math:`u_t = \beta_t v_t`, or with the delta rule :math:`u_t = \beta_t (v_t - (D_t S_{t-1})^T r_t)`.

    Attributes:
        query, key: ``[sequences, len, head_dim]``, float32 or wider and finite; each head of each batch item is one
            sequence.
        decay: g, at most 0, ``[sequences, len, 1 | head_dim]``; None for 0.
        beta: ``[sequences, len, 1]``; None for 1.
        segments: int64 ``[sequences, len]``, non-decreasing; where it increases, the state is reset to 0. None for one
            segment.
        recall: r, the keys with which the delta rule reads the state, like ``key``; None for ``key`` itself.
        scale: s.
        is_delta: whether to use the delta rule.
        extras: additional tensors that the matrices of `Mesa` and `Mamba3` use, ``[sequences, len | 1, width]``.
    """

    query: Tensor
    key: Tensor
    decay: Tensor | None
    beta: Tensor | None
    segments: Tensor | None
    recall: Tensor | None
    scale: float
    is_delta: bool
    extras: tuple[Tensor, ...] = ()

    @property
    def tensors(self) -> tuple[Tensor | None, ...]:
        """The tensors that all recurrences have: query, key, decay, beta, segments and recall."""
        return self[:6]

    def of(self, lines: slice | list[int], tokens: slice) -> Rule:
        """Return the recurrence for the selected tokens of the selected sequences."""
        decay, beta, segments, recall = (None if x is None else x[lines, tokens] for x in self[2:6])
        query, key = self.query[lines, tokens], self.key[lines, tokens]
        extras = tuple(x[lines] if x.shape[1] == 1 else x[lines, tokens] for x in self.extras)
        return Rule(query, key, decay, beta, segments, recall, self.scale, self.is_delta, extras)


def groups_of(length: int) -> Iterator[slice]:
    """Yield the token range of each group of chunks of a recurrence, in order."""
    for start in range(0, length, GROUP):
        yield slice(start, min(start + GROUP, length))


def split_chunks(x: Tensor, span: slice, dtype: torch.dtype | None = None) -> Tensor:
    """Divide a range of tokens ``[sequences, len, width]`` into chunks ``[chunks, sequences, CHUNK, width]``.

    The last chunk is padded with zeros. Chunks are the first axis, so that each chunk is contiguous and matrix products
    need no copy.
    """
    part = x[:, span]
    missing = -part.shape[1] % CHUNK
    part = F.pad(part, (0, 0, 0, missing)) if missing else part
    return part.unflatten(1, (-1, CHUNK)).transpose(0, 1).to(dtype).contiguous()


def join_chunks(chunks: Tensor, length: int) -> Tensor:
    """Join chunks into ``[sequences, length, width]``: the inverse of `split_chunks`."""
    return chunks.transpose(0, 1).flatten(1, 2)[:, :length]


FEW = 2  # up to this number of tokens, individual steps cost less than a chunk


def product_by_token(rule: Rule, value: Tensor, state: Tensor, segment: Tensor | None) -> tuple[Tensor, Tensor]:
    """Compute `product` token by token, from the definition of a recurrence. It is differentiable any number of times.

    Cost: a few passes over the state for each token; with gradients, every state is stored.
    """
    out = []
    for i in range(rule.key.shape[1]):
        query, key, written = rule.query[:, i], rule.key[:, i], value[:, i]
        if rule.segments is not None and segment is not None:
            is_same, segment = segment == rule.segments[:, i], rule.segments[:, i]
            state = state.masked_fill(~is_same[:, None, None], 0.0)
        if rule.decay is not None:
            state = state * rule.decay[:, i].exp()[..., None]
        if rule.is_delta:
            recall = key if rule.recall is None else rule.recall[:, i]
            written = written - (recall[:, None] @ state)[:, 0]
        if rule.beta is not None:
            written = written * rule.beta[:, i]
        state = torch.baddbmm(state, key[..., None], written[:, None])
        out.append((query[:, None] @ state)[:, 0] * rule.scale)
    return (torch.stack(out, 1) if out else value), state
