"""PaTH: softmax attention in which a product of Householder-like matrices, one per token, encodes positions."""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

from saccade.engine.tiles.grouped_heads import grouped, groups_of, product
from saccade.masks import Mask
from saccade.matrix import Block, Matrix
from saccade.matrix.uniform_matrix import UniformMatrix
from saccade.mechanisms.checked_mechanism import Approximate, Inputs, scale_of
from saccade.mechanisms.features.mask_support import Visible
from saccade.mechanisms.forgetting import Forgetting, check_widths, last_keys, log_gates, with_gates
from saccade.mechanisms.linear_time import LinearTimeMatrix
from saccade.mechanisms.readable_tensors import is_readable, is_surely_finite
from saccade.positions.token_positions import GivenPositions
from saccade.support.errors import describe, value_error
from saccade.support.torch_modes import is_transformed, without_autocast
from saccade.support.validation import check_int, check_number

_CHUNK = 64  # number of tokens whose reflections form one triangular system
_ROWS = 128  # largest number of rows that pass over the keys together
_ENTRIES = 1 << 22  # number of weights in a block


class PaTH(Approximate):
    r"""Softmax attention with data-dependent positions: each token between key and query reflects the key.

    .. math:: A = \mathrm{softmax}_j \big( s\, q_i^T H_i H_{i-1} \cdots H_{j+1} k_j \big), \qquad
              H_t = I - \beta_t w_t w_t^T

    The vectors w and the strengths β are the last channels of the keys, so every cache stores, crops, copies and saves
    them together with the keys, and decoding gives the same result as one call on the full sequence. `with_reflections`
    creates such keys. The vectors should have norm 1, and strengths should be between 0 and 2, so that no product
    increases the norm of a key. Nothing is normalised here. Forget gates, as in `Forgetting`, may follow as further
    channels (PaTH-FoX); their logarithms are added to the scores.

    Args:
        head_dim: width of the queries, and of the keys without w, β and gates.
        scale: s; ``head_dim ** -0.5`` when None.

    Raises:
        ValueError: in a call, the query or the key has the wrong width.
        UnsupportedError: any mask except Causal, Window, Documents with one of these inside, and masks that depend only
            on keys (Padding); keys out of order; a bias.

    Cost: O(q_len * kv_len * head_dim) time, even for pairs that are masked: at 4,096 tokens, about seven times that of
    ``Softmax(impl="tiled")``, which skips them. Memory is linear in the length, also in the backward pass, which
    recomputes the weights. A block of rows passes over all keys from the last to the first, 64 at a time, so a few
    queries take as many steps as many queries.

    Example:
        >>> from saccade.masks import Causal
        >>> query = key = torch.ones(1, 1, 3, 2)
        >>> w = torch.eye(2)[[0, 0, 1]][None, None]  # the second token negates x, the third negates y
        >>> keys = with_reflections(key, w, torch.full((1, 1, 3), 2.0))
        >>> PaTH(2, scale=1.0)(query, keys, mask=Causal())[0, 0]
        tensor([[1.0000, 0.0000, 0.0000],
                [0.1192, 0.8808, 0.0000],
                [0.0159, 0.1173, 0.8668]])

    Reference: Yang et al. 2025, arXiv:2505.16381, section 3.
    """

    needs_all_keys = True

    def __init__(self, head_dim: int, *, scale: float | None = None):
        super().__init__()
        self.head_dim = check_int("head_dim", head_dim)
        self.scale = None if scale is None else check_number("scale", scale)

    def reasons(self, mask: Mask) -> tuple[str, ...]:
        return Forgetting(self.head_dim).reasons(mask)

    def forward(
        self,
        query: Tensor,
        key: Tensor,
        *,
        mask: object = None,
        q_positions: GivenPositions = None,
        kv_positions: GivenPositions = None,
    ) -> PaTHMatrix:
        """Return the matrix of PaTH attention.

        Args:
            query: ``[batch, heads, q_len, head_dim]``, or as wide as the keys; extra channels are ignored.
            key: ``[batch, kv_heads, kv_len, 2 * head_dim + 1 + gates]``, from `with_reflections`: there is no gate,
                one for each query head of a key head, or one for all of them.
            mask: a causal mask. Keys that no query sees reflect nothing.
            q_positions, kv_positions: positions of the tokens, ascending; -1 for padding, which reflects nothing.
        """
        hint = "mechanisms.path.with_reflections(key, w, beta) joins keys and reflections"
        check_widths(query, key, self.head_dim, 2 * self.head_dim + 1, hint=hint, needs_gates=False)
        query, key, rest = query[..., : self.head_dim], key[..., : self.head_dim], key[..., self.head_dim :]
        return self._matrix_of(self._inputs(query, key, mask, q_positions, kv_positions), rest)

    def _matrix_of(self, inputs: Inputs, rest: Tensor | None = None) -> PaTHMatrix:
        if rest is None:
            rest = inputs.key.new_zeros(*inputs.key.shape[:3], self.head_dim + 1)
        return PaTHMatrix(inputs, rest, scale_of(self.scale, self.head_dim))

    def extra_repr(self) -> str:
        return f"{self.head_dim}, scale={self.scale}"


def with_reflections(key: Tensor, w: Tensor, beta: Tensor, gates: Tensor | None = None) -> Tensor:
    """Append the vectors and strengths of reflections to keys, in the form that `PaTH` requires.

    Args:
        key, w: ``[batch, kv_heads, kv_len, head_dim]``.
        beta: ``[batch, kv_heads, kv_len]``.
        gates: forget gates before the sigmoid, ``[batch, heads, kv_len]``; None for no gates.

    Returns:
        ``[batch, kv_heads, kv_len, 2 * head_dim + 1]``, plus ``heads // kv_heads`` channels with gates, in the dtype of
        the keys.
    """
    if w.shape != key.shape or beta.shape != key.shape[:3]:
        rule = f"have shapes {list(key.shape)} and {list(key.shape[:3])}"
        raise value_error("w and beta", rule, f"{list(w.shape)} and {list(beta.shape)}", facts=[describe("key", key)])
    joined = torch.cat([key, w.to(key.dtype), beta[..., None].to(key.dtype)], 3)
    return joined if gates is None else with_gates(joined, gates)


class _Chunks(NamedTuple):
    """Keys in chunks, and the solution of each chunk's triangular system, which combines its reflections.

    All have shape ``[batch, kv_heads, chunks, _CHUNK, width]``; tril keeps only entries below the diagonal.

    Attributes:
        key, w: keys k and vectors w.
        passed_w: T diag(β) W, where T = (I + tril(diag(β) W Wᵀ))⁻¹.
        passed_key: T tril(diag(β) W Kᵀ).
    """

    key: Tensor
    w: Tensor
    passed_w: Tensor
    passed_key: Tensor


class PaTHMatrix(LinearTimeMatrix):
    """The lazy matrix of `PaTH`; weights are computed in blocks of rows.

    Args:
        inputs: the checked inputs.
        rest: w, β and, if there are any, the gates, ``[batch, kv_heads, kv_len, head_dim + 1 + gates]``.
        scale: s.
    """

    is_stochastic = True

    def __init__(self, inputs: Inputs, rest: Tensor, scale: float):
        query, key = inputs.query, inputs.key
        super().__init__(inputs.shape, key.shape[1], dtype=query.dtype, device=query.device)
        self.visible, self._last = Visible.of(inputs), last_keys(inputs)
        rest, gates = rest.split([key.shape[3] + 1, rest.shape[3] - key.shape[3] - 1], 3)
        bad = ~torch.cat([key, rest], 3).detach().isfinite().all(-1) | gates.detach().isnan().any(-1)
        self._bad_keys = bad if not is_readable(bad) or bool(bad.any()) else None
        self._bad_rows = ~query.detach().isfinite().all(-1)
        key, rest = (x.masked_fill(bad[..., None], 0.0).to(inputs.wide) for x in (key, rest))
        self._query = query.masked_fill(self._bad_rows[..., None], 0.0).to(inputs.wide) * scale
        beta = rest[..., -1:]
        if self.visible.hidden_keys is not None:
            beta = beta.masked_fill(self.visible.hidden_keys[:, None, :, None], 0.0)
        with without_autocast(self.device):
            self._chunks = _chunks_of(key, rest[..., :-1], beta)
        self._sums: Tensor | None = None
        if gates.shape[3]:
            logs = log_gates(gates.masked_fill(bad[..., None], math.inf), inputs.shape[1] // max(1, key.shape[1]))
            hidden = self.visible.hidden_keys
            self._sums = (logs if hidden is None else logs.masked_fill(hidden[:, None], 0.0)).cumsum(2)

    def uniform(self) -> Matrix:
        return UniformMatrix(self, self.visible.in_block)

    def blocks(self, batch: int | None = None, head: int | None = None, rows: range | None = None) -> Iterator[Block]:
        for items, heads, span in self._parts(batch, head, rows):
            allowed = self._allowed(items, span)
            weights = self._weights(items, heads, span, allowed)
            weights = weights.masked_fill(self._nan_rows(items, heads, span, allowed)[..., None], math.nan)
            yield Block(items, heads, span, (range(self.shape[3]),), weights)

    def _times(self, value: Tensor) -> Tensor:
        wide = value.to(self._query.dtype)
        bad = None if is_surely_finite(wide) else ~wide.detach().isfinite()
        clean = wide if bad is None else wide.masked_fill(bad, 0.0)

        def multiply(rows: range, value: Tensor) -> Tensor:
            allowed = self._allowed(everything[0], rows)
            out = product(self._weights(*everything, rows, allowed), value)
            out = out.masked_fill(self._nan_rows(*everything, rows, allowed)[..., None], math.nan)
            if bad is None:
                return out
            return out.masked_fill(product(allowed.to(out.dtype).expand(-1, heads, -1, -1), bad.to(out)) > 0, math.nan)

        batch, heads, q_len, _ = self.shape
        everything = slice(0, batch), slice(0, heads)
        parts = []
        for _, _, rows in self._parts():
            if torch.is_grad_enabled() and not is_transformed() and not torch.compiler.is_compiling():
                parts.append(checkpoint(multiply, rows, clean, use_reentrant=False))
            else:
                parts.append(multiply(rows, clean))
        if parts:
            return torch.cat(parts, 2)
        nothing = sum(x.sum() for x in (self._query, self._chunks.key, self._chunks.passed_w, clean))
        return wide.new_zeros(batch, heads, q_len, value.shape[3]) + 0.0 * nothing  # keeps the autograd graph

    def _parts(
        self, batch: int | None = None, head: int | None = None, rows: range | None = None
    ) -> Iterator[tuple[slice, slice, range]]:
        """Yield the items, heads and rows of each block, which covers a few rows in all items and heads."""
        self._check_part(batch, head, rows)
        items = slice(0, self.shape[0]) if batch is None else slice(batch, batch + 1)
        heads = slice(0, self.shape[1]) if head is None else slice(head, head + 1)
        rows = range(self.shape[2]) if rows is None else rows
        count = (items.stop - items.start) * (heads.stop - heads.start) * self.shape[3]
        height = max(1, min(_ROWS, _ENTRIES // max(1, count)))
        for start in range(0, len(rows), height) if count else ():
            yield items, heads, rows[start : start + height]

    def _allowed(self, items: slice, rows: range) -> Tensor:
        """Return which keys each of the rows sees, bool ``[batch, 1, rows, kv_len]``."""
        whole = self.visible.allowed(items, range(rows[0], rows[-1] + 1), range(self.shape[3]))
        return whole[:, :, :: rows.step]

    def _weights(self, items: slice, heads: slice, rows: range, allowed: Tensor) -> Tensor:
        """Return the weights of some rows, ``[batch, heads, rows, kv_len]``, as if all inputs were finite."""
        span, of_keys = slice(rows[0], rows[-1] + 1, rows.step), groups_of(heads, self.shape[1], self.kv_heads)
        last = (self._last if len(self._last) == 1 else self._last[items])[:, span]
        groups = (heads.stop - heads.start) // (of_keys.stop - of_keys.start)
        parts, last_of_groups = _Chunks(*(x[items, of_keys] for x in self._chunks)), last.repeat(1, groups)
        with without_autocast(self.device):
            scores = grouped(
                lambda query, _: _scores(query, parts, last_of_groups[:, None, :, None]),
                self._query[items, heads, span],
                parts.key,
            )[..., : self.shape[3]]
        if self._sums is not None:
            sums = self._sums[items, heads]
            of_rows = sums.gather(2, last[:, None].expand(len(sums), sums.shape[1], -1))
            scores = scores + (of_rows[..., None] - sums[:, :, None]).to(scores.dtype)
        scores = scores.masked_fill(~allowed, -torch.inf)
        empty = ~allowed.any(-1, keepdim=True)
        return scores.masked_fill(empty, 0.0).softmax(-1).masked_fill(~allowed, 0.0)

    def _nan_rows(self, items: slice, heads: slice, rows: range, allowed: Tensor) -> Tensor:
        """Return which rows have a non-finite query or see a non-finite key, bool ``[batch, heads, rows]``."""
        nan = self._bad_rows[items, heads, slice(rows[0], rows[-1] + 1, rows.step)] & allowed.any(-1)
        if self._bad_keys is None:
            return nan
        of_keys = groups_of(heads, self.shape[1], self.kv_heads)
        bad = self._bad_keys[items, of_keys]
        bad = bad.repeat_interleave((heads.stop - heads.start) // bad.shape[1], 1)
        return nan | (allowed & bad[:, :, None]).any(-1)


def _chunks_of(key: Tensor, w: Tensor, beta: Tensor) -> _Chunks:
    """Divide keys and reflections into chunks, and solve the triangular system of each."""
    missing = -key.shape[2] % _CHUNK
    key, w, beta = (F.pad(x, (0, 0, 0, missing)).unflatten(2, (-1, _CHUNK)) for x in (key, w, beta))
    below = torch.ones(_CHUNK, _CHUNK, dtype=torch.bool, device=key.device).tril(-1)
    strong = beta * w
    system = (strong @ w.mT).masked_fill(~below, 0.0)
    right = torch.cat([strong, (strong @ key.mT).masked_fill(~below, 0.0)], -1)
    solved = torch.linalg.solve_triangular(system, right, upper=False, unitriangular=True)
    passed_w, passed_key = solved.split([w.shape[-1], _CHUNK], -1)
    return _Chunks(key, w, passed_w, passed_key)


def _scores(query: Tensor, chunks: _Chunks, last: Tensor) -> Tensor:
    """Return the scores of rows with all keys, chunk by chunk from the last key to the first.

    Args:
        query: ``[batch, kv_heads, rows, head_dim]``; the query heads of a key head are folded into the rows.
        chunks: the chunks of the same key heads.
        last: index of the last key that each query sees, ``[batch | 1, 1, rows, 1]``. Later keys reflect nothing, and
            their scores are meaningless.
    """
    scores = []
    for number in reversed(range(chunks.key.shape[2])):
        key, w, passed_w, passed_key = (x[:, :, number] for x in chunks)
        place = torch.arange(number * _CHUNK, (number + 1) * _CHUNK, device=query.device)
        overlap = (query @ w.mT).masked_fill(place > last, 0.0)
        scores.append(query @ key.mT - overlap @ passed_key)
        query = query - overlap @ passed_w
    return torch.cat(scores[::-1], -1)
