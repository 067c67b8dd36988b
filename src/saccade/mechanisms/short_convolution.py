"""ShortConvolution: a causal convolution over a few tokens, with separate weights for each channel."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from saccade.caches import SinkWindowCache
from saccade.masks import Causal, Full, Mask
from saccade.matrix import Block, Matrix
from saccade.matrix.uniform_matrix import UniformMatrix
from saccade.mechanisms.checked_mechanism import Approximate, Inputs
from saccade.mechanisms.linear_time import LinearTimeMatrix
from saccade.support.errors import value_error
from saccade.support.language import Message
from saccade.support.numerics import wide_dtype
from saccade.support.validation import check_int


class ShortConvolution(Approximate):
    r"""A causal convolution over the last ``width`` positions, with separate weights for each channel.

    .. math:: y_{tc} = \sum_{d=0}^{\mathrm{width} - 1} w_{cd}\, x_{t-d,\,c}, \qquad A_{ij} = w_{c,\,i-j}

    Each head is one channel; queries and keys only determine the number of tokens. Distances are measured in positions,
    and a token reads only tokens that are visible to it under the mask: with `saccade.masks.Documents`, no token reads
    across documents. `saccade.nn.MultiHeadAttention` and `saccade.nn.Recurrence` apply it to queries, keys and values
    (``short_convolution=``).

    Args:
        channels: number of channels, which are the heads of the matrix.
        width: number of positions that a token reads, including its own, at least 1.

    Attributes:
        weight: w, trainable, ``[channels, width]``; the first column is the weight of the token itself. Initially
            uniform between ``-width ** -0.5`` and ``width ** -0.5``, as in torch's convolutions.

    Raises:
        ValueError: a size is below 1, or the inputs have a different number of heads.
        UnsupportedError: a mask that differs between heads.

    Cost: O(n * width) for each channel. For decoding, a `saccade.caches.SinkWindowCache` stores the last ``width``
    tokens.

    Example:
        >>> from saccade.masks import Causal
        >>> convolution = ShortConvolution(1, 2)
        >>> _ = convolution.weight.data.copy_(torch.tensor([[1.0, 0.5]]))
        >>> x = torch.ones(1, 1, 3, 1)
        >>> convolution(x, x, mask=Causal())[0, 0].detach()
        tensor([[1.0000, 0.0000, 0.0000],
                [0.5000, 1.0000, 0.0000],
                [0.0000, 0.5000, 1.0000]])

    Reference: Fu et al. 2023, arXiv:2212.14052, section 3.1 (H3); So et al. 2021, arXiv:2109.08668 (Primer).
    """

    def __init__(self, channels: int, width: int = 4):
        super().__init__()
        self.channels, self.width = check_int("channels", channels), check_int("width", width)
        self.weight = nn.Parameter(torch.empty(self.channels, self.width))
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Draw new weights for the convolution."""
        nn.init.uniform_(self.weight, -(self.width**-0.5), self.width**-0.5)

    def reasons(self, mask: Mask) -> tuple[str, ...]:
        if mask.shape[1] > 1:
            return (Message("the mask differs between heads, which are channels here"),)
        return ()

    def new_cache(self, max_len: int | None = None) -> SinkWindowCache:
        """Return an empty `saccade.caches.SinkWindowCache`, which stores the last ``width`` tokens."""
        return SinkWindowCache(0, self.width)

    def _matrix_of(self, inputs: Inputs) -> ConvolutionMatrix:
        if inputs.shape[1] != self.channels or inputs.key.shape[1] != self.channels:
            got = f"{inputs.shape[1]} and {inputs.key.shape[1]}"
            raise value_error("heads", f"be equal to the {self.channels} channels for queries and keys", got)
        return ConvolutionMatrix(self.weight, inputs)

    def extra_repr(self) -> str:
        return f"{self.channels}, {self.width}"


class ConvolutionMatrix(LinearTimeMatrix):
    """The lazy matrix of a short convolution: ``A_ij = w_{c, i-j}`` for the keys that a token reads.

    Args:
        weight: ``[channels, width]``.
        inputs: the checked inputs of the call.
    """

    is_stochastic = False

    def __init__(self, weight: Tensor, inputs: Inputs):
        super().__init__(inputs.shape, inputs.shape[1], dtype=inputs.query.dtype, device=inputs.query.device)
        self.weight, self._inputs = weight.to(wide_dtype(self.dtype)), inputs
        self._columns, self._is_read = _columns_at_distances(inputs, weight.shape[1])
        q_start, kv_start = inputs.starts
        self._offset = None if q_start is None or kv_start is None else q_start - kv_start

    def _times(self, value: Tensor) -> Tensor:
        value = value.to(wide_dtype(value.dtype))
        if self._is_one_run:
            return self._convolved(value)
        out = value.new_zeros(*self.shape[:3], value.shape[3])
        if not self.shape[3]:
            return out + 0.0 * self.weight.sum()  # still differentiable
        for distance in range(self.weight.shape[1]):
            index, is_read = self._at(distance, value.shape[3])
            read = self._shifted(value, distance)
            if read is None:
                read = value.gather(2, index.expand(-1, self.shape[1], -1, -1))
            out = out + self.weight[:, distance, None, None] * read.masked_fill(~is_read, 0.0)
        return out

    @property
    def _is_one_run(self) -> bool:
        """Whether the tokens are one sequence without padding, and each query has the position of a key."""
        offset, (_, _, q_len, kv_len) = self._offset, self.shape
        in_keys = offset is not None and 0 <= offset <= kv_len - q_len and q_len > 0
        return in_keys and isinstance(self._inputs.rule, Causal | Full)

    def _convolved(self, value: Tensor) -> Tensor:
        """Return the product for one sequence without padding, computed by torch's convolution."""
        width, start = self.weight.shape[1], self._offset or 0
        lines = value.movedim(3, 1).flatten(0, 1)[:, :, : start + self.shape[2]]
        lines = F.conv1d(F.pad(lines, (width - 1, 0)), self.weight.flip(1)[:, None], groups=self.shape[1])
        return lines[:, :, start:].unflatten(0, (value.shape[0], value.shape[3])).movedim(1, 3)

    def _shifted(self, value: Tensor, distance: int) -> Tensor | None:
        """Return the value ``distance`` tokens before each query, or 0 if there is none.

        If the tokens are not in order, return None.
        """
        if self._offset is None:
            return None
        start, (_, _, q_len, kv_len) = self._offset - distance, self.shape
        before, after = min(max(-start, 0), q_len), min(max(start + q_len - kv_len, 0), q_len)
        return F.pad(value[:, :, max(start, 0) : max(start + q_len, 0)], (0, 0, before, after))[:, :, :q_len]

    def rmatmul(self, x: Tensor) -> Tensor:
        """Return ``A.mT @ x`` in linear time; see `Matrix.rmatmul`."""
        x = self._operand(x, "x", self.shape[1], self.shape[2])
        out = x.new_zeros(*self.shape[:2], self.shape[3], x.shape[3], dtype=wide_dtype(x.dtype))
        for distance in range(self.weight.shape[1] if self.shape[3] else 0):
            index, is_read = self._at(distance, x.shape[3])
            part = (self.weight[:, distance, None, None] * x.to(out.dtype)).masked_fill(~is_read, 0.0)
            out = out.scatter_add(2, index.expand(-1, self.shape[1], -1, -1), part)
        return out.to(x.dtype)

    def uniform(self) -> Matrix:
        return UniformMatrix(self, lambda block: block.weights != 0)

    def blocks(self, batch: int | None = None, head: int | None = None, rows: range | None = None) -> Iterator[Block]:
        for items, heads, span in self._pieces(batch, head, rows):
            own = slice(span.start, span.stop)
            columns, is_read = (x[items, own] if len(x) > 1 else x[:, own] for x in (self._columns, self._is_read))
            many = items.stop - items.start
            weights = self.weight[heads][None, :, None].expand(many, -1, len(span), -1)
            weights = weights.masked_fill(~is_read[:, None], 0.0)
            index = columns[:, None].expand(many, weights.shape[1], -1, -1)
            whole = weights.new_zeros(*weights.shape[:3], self.shape[3]).scatter_add(3, index, weights)
            yield Block(items, heads, span, (range(self.shape[3]),), whole)

    def _at(self, distance: int, width: int) -> tuple[Tensor, Tensor]:
        """Return the index of the key ``distance`` positions before each query, and whether the query reads it.

        The indices are ``[batch, 1, q_len, width]``.
        """
        batch, _, q_len, _ = self.shape
        columns, is_read = (x[:, None, :, distance, None] for x in (self._columns, self._is_read))
        return columns.expand(batch, 1, q_len, width), is_read


def _columns_at_distances(inputs: Inputs, width: int) -> tuple[Tensor, Tensor]:
    """Return the column of the key at each distance before each query, and whether the query reads it.

    Both are ``[batch | 1, q_len, width]``. Columns that are not read are arbitrary, but valid, indices.
    """
    q, kv = inputs.position_tables()
    wanted = q[..., None] - torch.arange(width, device=q.device)
    rows = max(len(q), len(kv))
    if not kv.shape[1]:
        nothing = torch.zeros_like(wanted)
        return nothing, nothing.bool()
    first = inputs.starts[1]
    if first is not None:
        column = wanted - first
    else:
        ordered, order = kv.expand(rows, -1).sort(1)
        place = torch.searchsorted(ordered.contiguous(), wanted.expand(rows, -1, -1).flatten(1).contiguous())
        column = order.gather(1, place.clamp(max=kv.shape[1] - 1)).unflatten(1, wanted.shape[1:])
    inside = (column >= 0) & (column < kv.shape[1])
    column = column.clamp(0, kv.shape[1] - 1)
    held = kv.expand(rows, -1).gather(1, column.expand(rows, -1, -1).flatten(1)).unflatten(1, wanted.shape[1:])
    is_read = inside & (held == wanted) & (wanted >= 0 if inputs.is_placed else inside)
    items = torch.arange(inputs.shape[0], device=q.device)[:, None, None]
    rule = inputs.rule
    allowed = rule.allows(items, torch.zeros_like(items), q[..., None], held)
    return column, is_read & (allowed if rule.shape[0] > 1 else allowed[:1])
