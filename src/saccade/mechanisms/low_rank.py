"""Low-rank attention through a few slots or landmarks, shared by Linformer and Nystrom."""

from __future__ import annotations

import math
from abc import abstractmethod
from collections.abc import Iterator
from typing import NamedTuple

import torch
from torch import Tensor

from saccade.engine.tiles.grouped_heads import groups_of, product
from saccade.masks import Full, Mask
from saccade.matrix import AttentionMatrix, Block
from saccade.mechanisms.checked_mechanism import Inputs, parts_of
from saccade.mechanisms.linear_time import LinearTimeMatrix
from saccade.mechanisms.readable_tensors import is_readable, marks_or_none
from saccade.support.language import Message
from saccade.support.torch_modes import without_autocast


class LowRankMatrix(LinearTimeMatrix):
    """A low-rank matrix ``left @ right``: attention from queries to a few slots, times the slots' weights for keys.

    Args:
        left: attention from queries to the slots, ``[batch, heads, q_len, slots]``.
        kv_heads, kv_len: sizes of the right factor.
        dtype: dtype of the inputs and of matrix products.
        padding_rows: bool ``[batch, q_len]``, True at padding.

    Cost: products take O((q_len + kv_len) * slots * width) time, and memory that is linear in the lengths.
    """

    def __init__(self, left: NarrowSoftmax, kv_heads: int, kv_len: int, *, dtype: torch.dtype, padding_rows: Tensor):
        super().__init__((*left.query.shape[:3], kv_len), kv_heads, dtype=dtype, device=left.query.device)
        self.left, self._padding_rows = left, marks_or_none(padding_rows)

    @property
    def is_stochastic(self) -> bool:
        """Always False, because weights may be below 0 and rows need not sum to 1."""
        return False

    @abstractmethod
    def _gathered(self, value: Tensor) -> Tensor:
        """Return ``right @ value``, a weighted sum of values per slot, ``[batch, heads | kv_heads, slots, width]``."""

    @abstractmethod
    def _scattered(self, x: Tensor) -> Tensor:
        """Return ``right.mT @ x``, which maps slots back to keys, for ``x [batch, heads, slots, width]``."""

    @abstractmethod
    def _right(self, items: slice, heads: slice) -> Tensor:
        """Return the dense right factor of some heads, ``[batch | 1, heads | key heads | 1, slots, kv_len]``."""

    def _times(self, value: Tensor) -> Tensor:
        return self._zero_padding(self.left.times(self._gathered(value.to(self.left.query.dtype))))

    def rmatmul(self, x: Tensor) -> Tensor:
        """Return ``A.mT @ x`` in linear time; see `Matrix.rmatmul`."""
        x = self._operand(x, "x", self.shape[1], self.shape[2])
        with without_autocast(self.device):
            rows = self._zero_padding(x.to(self.left.query.dtype))
            return self._scattered(self.left.matrix().mT @ rows).to(x.dtype)

    def blocks(self, batch: int | None = None, head: int | None = None, rows: range | None = None) -> Iterator[Block]:
        part: tuple[slice, slice] | None = None
        for items, heads, span in self._pieces(batch, head, rows):
            if part != (items, heads):  # the right factor is the same for all rows of a head
                part, right = (items, heads), self._right(items, heads)
            left = self.left.weights(items, heads, span)
            weights = product(left, right.expand(len(left), -1, -1, -1))
            if self._padding_rows is not None:
                weights = weights.masked_fill(self._padding_rows[items, None, span.start : span.stop, None], 0.0)
            yield Block(items, heads, span, (range(self.shape[3]),), weights)

    def _zero_padding(self, rows: Tensor) -> Tensor:
        return rows if self._padding_rows is None else rows.masked_fill(self._padding_rows[:, None, :, None], 0.0)


class MaskedTokens(NamedTuple):
    """The queries and keys of a low-rank matrix, with masked tokens and padding set to 0.

    A non-finite token affects all rows, since every row attends to every slot.

    Attributes:
        query: ``[batch, heads, q_len, head_dim]``, in float32 or wider.
        key: ``[batch, kv_heads, kv_len, head_dim]``, in float32 or wider.
        rows, keys: positions, int64 ``[batch | 1, len]``.
        padding_rows: bool ``[batch, q_len]``, True at padding.
        hidden: bool ``[batch, kv_len]``, keys that no query may attend to.
    """

    query: Tensor
    key: Tensor
    rows: Tensor
    keys: Tensor
    padding_rows: Tensor
    hidden: Tensor

    @classmethod
    def of(cls, inputs: Inputs) -> MaskedTokens:
        """Return the queries and keys of checked inputs, with masked tokens and padding set to 0."""
        rows, keys = inputs.position_tables()
        padding_rows, hidden = _is_padding(inputs, rows), hidden_at(inputs, keys)
        query = inputs.query.to(inputs.wide).masked_fill(padding_rows[:, None, :, None], 0.0)
        key = inputs.key.to(inputs.wide).masked_fill(hidden[:, None, :, None], 0.0)
        return cls(query, key, rows, keys, padding_rows, hidden)


def hidden_at(inputs: Inputs, positions: Tensor) -> Tensor:
    """Return which ``positions [batch | 1, len]`` are padding or hidden by the mask, as bool ``[batch, len]``."""
    hidden = _is_padding(inputs, positions)
    if isinstance(inputs.rule, Full):
        return hidden
    items = torch.arange(inputs.shape[0], device=positions.device)[:, None]
    zeros = torch.zeros_like(items)
    return hidden | ~inputs.rule.allows(items, zeros, zeros, positions.clamp(min=0))


def why_not_keys_only(mask: Mask, because: str) -> tuple[str, ...]:
    """Return the reasons why low-rank attention does not support a mask.

    The tuple is empty for masks that depend only on keys.
    """
    return tuple(
        Message("{mask} lets queries see different keys: {because}", mask=type(part).__name__, because=Message(because))
        for part in parts_of(mask)
        if not part.hides_keys_only
    )


def _is_padding(inputs: Inputs, positions: Tensor) -> Tensor:
    """Return which tokens are padding from their positions, which are negative at padding, as bool ``[batch, len]``."""
    return ((positions < 0) & inputs.is_placed).expand(inputs.shape[0], -1)


class NarrowSoftmax(NamedTuple):
    """A factor of low-rank attention: softmax attention with few queries or few keys.

    Attributes:
        query: ``[batch, heads, rows, head_dim]``.
        key: ``[batch, heads or kv_heads, columns, head_dim]``.
        hidden: bool ``[batch, columns]``, columns that no query attends to.
        scale: scale of the dot products.
    """

    query: Tensor
    key: Tensor
    hidden: Tensor
    scale: float

    def matrix(self) -> AttentionMatrix:
        """Return this softmax factor as a lazy matrix."""
        if is_readable(self.hidden):
            mask = ~self.hidden[:, None, None] if bool(self.hidden.any()) else None
            return AttentionMatrix(self.query, self.key, mask, scale=self.scale)
        # Under vmap, a mask cannot differ between batch items, but a bias can.
        bias = self.query.new_zeros(self.hidden.shape).masked_fill(self.hidden, -math.inf)
        return AttentionMatrix(self.query, self.key, bias=bias[:, None, None], scale=self.scale)

    def times(self, value: Tensor) -> Tensor:
        """Return the product of this softmax factor with a value. Masked columns contribute nothing."""
        if not is_readable(self.hidden):
            value = value.masked_fill(self.hidden[:, None, :, None], 0.0)  # the weight is 0, but 0 * NaN is NaN
        return self.matrix().matmul(value)  # a compiler treats "@" as a product of tensors

    def weights(self, items: slice, heads: slice, rows: range) -> Tensor:
        """Return some rows of this softmax factor as a dense tensor."""
        groups = groups_of(heads, self.query.shape[1], self.key.shape[1])
        scores = product(self.query[items, heads, rows.start : rows.stop], self.key[items, groups].mT) * self.scale
        hidden = self.hidden[items, None, None]
        return scores.masked_fill(hidden, -math.inf).softmax(-1).masked_fill(hidden, 0.0)
