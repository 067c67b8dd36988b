"""Attention within the rows or columns of a table of tokens, and AlphaFold's triangle attention."""

from __future__ import annotations

from typing import Literal

import torch
from torch import Tensor, nn

from saccade.matrix import Matrix
from saccade.nn.attention import MultiHeadAttention
from saccade.nn.base_layer import Layer
from saccade.nn.projections import weight_of
from saccade.support.argument_hints import ArgumentHints
from saccade.support.errors import describe, type_error, value_error
from saccade.support.validation import ShapeSpec, check_choice, check_int

_TABLE = ShapeSpec("x [batch, rows, columns, embed_dim]")
_VALID = ShapeSpec("valid [batch, rows, columns]")
_PAIRS = ShapeSpec("pairs [batch, columns, columns, pair_dim]")


class TableAttention(ArgumentHints, Layer):
    """The base class of the Evoformer's attention layers: a norm, then gated multi-head attention in each table row.

    All rows are computed in one call: the rows form the batch axis, and the heads of all batch items form the head
    axis. The bias of a batch item is therefore stored only once for all rows of the item.

    Args:
        embed_dim: width of the tokens.
        num_heads: number of heads; must divide ``embed_dim``.

    Attributes:
        norm: the norm applied to the tokens.
        attention: the projections and the mechanism. The gate and output projections have a bias; those of queries,
            keys and values do not.
    """

    def __init__(self, embed_dim: int, num_heads: int):
        super().__init__()
        attention = MultiHeadAttention(embed_dim, num_heads, projection_bias=False, output_gate=True)
        attention.gate_projection = nn.Linear(embed_dim, embed_dim)
        attention.output_projection = nn.Linear(embed_dim, embed_dim)
        self.embed_dim, self.num_heads, self.attention = embed_dim, num_heads, attention
        self.norm = nn.LayerNorm(embed_dim)
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Initialize the layer as in AlphaFold, with mostly open gates and an output of 0."""
        self.attention.reset_parameters()
        gate, output = self.attention.gate_projection, self.attention.output_projection
        assert isinstance(gate, nn.Linear)
        for x, value in ((gate.weight, 0.0), (gate.bias, 1.0), (output.weight, 0.0), (output.bias, 0.0)):
            nn.init.constant_(x, value)

    def extra_repr(self) -> str:
        return f"{self.embed_dim}, num_heads={self.num_heads}"

    def _check(self, x: Tensor, valid: Tensor | None, shapes: ShapeSpec = _TABLE) -> None:
        """Raise an error unless a table of tokens and ``valid`` match the layer and each other."""
        shapes.check(x, embed_dim=self.embed_dim)
        weight = weight_of(self.attention.query_projection)
        if weight is not None and x.dtype != weight.dtype and not torch.is_autocast_enabled(x.device.type):
            rule, got = (str(dtype).removeprefix("torch.") for dtype in (weight.dtype, x.dtype))
            raise value_error("dtype", f"be {rule}, like the parameters", got, facts=[describe("x", x)])
        if valid is None:
            return
        batch, rows, columns = x.shape[:3]
        _VALID.check(valid, batch=batch, rows=rows, columns=columns)
        if valid.dtype != torch.bool:
            hint = "True marks a token, False padding"
            raise type_error("valid", "be a bool tensor", str(valid.dtype).removeprefix("torch."), hint=hint)

    def _attend(self, x: Tensor, bias: Tensor | None, valid: Tensor | None) -> Tensor:
        """Return the output for a normalized table, ``[batch, rows, columns, embed_dim]``."""
        attention = self.attention
        heads = self._matrix(x, bias, valid).matmul(self._split(attention.value_projection, x))
        merged = heads.unflatten(1, (len(x), self.num_heads)).permute(1, 0, 3, 2, 4).flatten(3)
        gate = attention.gate_projection
        return attention.output_projection(merged if gate is None else merged * torch.sigmoid(gate(x)))

    def _matrix(self, x: Tensor, bias: Tensor | None, valid: Tensor | None) -> Matrix:
        """Return the attention matrices within each row of a table, ``[rows, batch * num_heads, columns, columns]``.

        Args:
            x: ``[batch, rows, columns, embed_dim]``.
            bias: ``[batch, columns, columns, num_heads]``, shared by all rows of a batch item.
            valid: bool ``[batch, rows, columns]``.
        """
        attention, mask = self.attention, None
        if valid is not None:
            mask = valid.transpose(0, 1)[:, :, None]  # [rows, batch, 1, columns]
            mask = mask if len(x) == 1 else mask.repeat_interleave(self.num_heads, 1)
        mechanism = attention.mechanism
        if bias is not None:
            mechanism = mechanism.with_bias(bias.permute(0, 3, 1, 2).flatten(0, 1)[None])
        query, key = self._split(attention.query_projection, x), self._split(attention.key_projection, x)
        return mechanism(query, key, mask=mask)

    def _split(self, projection: nn.Module, x: Tensor) -> Tensor:
        """Project a table ``[batch, rows, columns, embed_dim]`` to ``[rows, batch * num_heads, columns, head_dim]``."""
        return projection(x).unflatten(-1, (self.num_heads, -1)).permute(1, 0, 3, 2, 4).flatten(1, 2)


class RowAttention(TableAttention):
    r"""AlphaFold's gated row attention: tokens attend within their row, with a bias from pairs of columns.

    .. math:: \mathrm{out}_r = \big(\sigma(x_r W_G) \odot \mathrm{Concat}_h(A_{rh} V_{rh})\big) W_O, \qquad
              A_{rh} = \mathrm{softmax}\Big(\frac{Q_{rh} K_{rh}^\top}{\sqrt{d}} + B_h\Big), \qquad
              B = \mathrm{norm}(\mathrm{pairs})\, W_B

    x is normalized first, and the output is meant to be added to x. In an alignment, rows are sequences, and columns
    are positions in these sequences.

    Args:
        embed_dim: width of the tokens.
        num_heads: number of heads; must divide ``embed_dim``.
        pair_dim: width of the column pairs' representation; None for no pairs.

    Attributes:
        pair_norm, bias_projection: layers for the pairs, or None.

    Raises:
        ValueError, TypeError: the sizes are incompatible, or only one of pairs and ``pair_dim`` is passed.

    Cost: O(batch · rows · columns² · embed_dim) time. The bias has ``batch · num_heads · columns²`` elements,
    regardless of the number of rows, and the full matrices are never stored.

    Example:
        >>> layer = RowAttention(16, 4, pair_dim=8)
        >>> x, pairs = torch.randn(2, 3, 5, 16), torch.randn(2, 5, 5, 8)
        >>> layer(x, pairs).shape, layer.matrix(x, pairs).shape
        (torch.Size([2, 3, 5, 16]), (3, 8, 5, 5))

    Reference: Jumper et al. 2021, "Highly accurate protein structure prediction with AlphaFold", supplement, algorithm
    7 (with pairs); Rao et al. 2021, "MSA Transformer".
    """

    def __init__(self, embed_dim: int, num_heads: int, pair_dim: int | None = None):
        super().__init__(embed_dim, num_heads)
        self.pair_dim = None if pair_dim is None else check_int("pair_dim", pair_dim)
        self.pair_norm = None if pair_dim is None else nn.LayerNorm(pair_dim)
        self.bias_projection = None if pair_dim is None else nn.Linear(pair_dim, num_heads, bias=False)

    def forward(self, x: Tensor, pairs: Tensor | None = None, *, valid: Tensor | None = None) -> Tensor:
        """Apply attention within each row of a table.

        Args:
            x: ``[batch, rows, columns, embed_dim]``.
            pairs: ``[batch, columns, columns, pair_dim]``, where entry (i, j) belongs to a query in column i and a key
                in column j.
            valid: bool ``[batch, rows, columns]``: False marks padding, which no token attends to; None if there is no
                padding.

        Returns:
            ``[batch, rows, columns, embed_dim]``. A row without valid tokens gets the bias of the output
            projection.
        """
        bias = self._bias(x, pairs, valid)
        return self._attend(self.norm(x), bias, valid)

    def matrix(self, x: Tensor, pairs: Tensor | None = None, *, valid: Tensor | None = None) -> Matrix:
        """Return the lazy attention matrix of each row, ``[rows, batch * num_heads, columns, columns]``; see `forward`.

        Head h of item b is head ``b * num_heads + h``.
        """
        bias = self._bias(x, pairs, valid)
        return self._matrix(self.norm(x), bias, valid)

    def _bias(self, x: Tensor, pairs: Tensor | None, valid: Tensor | None) -> Tensor | None:
        self._check(x, valid)
        if self.pair_norm is None or self.bias_projection is None:
            if pairs is not None:
                hint = "RowAttention(..., pair_dim=...) takes them"
                raise value_error("pairs", "be None without a pair_dim", "a tensor", hint=hint)
            return None
        if pairs is None:
            raise value_error("pairs", "be given, because the layer has a pair_dim", None)
        _PAIRS.check(pairs, batch=len(x), columns=x.shape[2], pair_dim=self.pair_dim or 0)
        return self.bias_projection(self.pair_norm(pairs))


class ColumnAttention(TableAttention):
    """AlphaFold's gated column attention: tokens attend within their column.

    It is `RowAttention` without pairs, with rows and columns swapped.

    Args:
        embed_dim: width of the tokens.
        num_heads: number of heads; must divide ``embed_dim``.

    Raises:
        ValueError, TypeError: the sizes are incompatible.

    Cost: O(batch · columns · rows² · embed_dim) time. The full matrices are never stored.

    Example:
        >>> layer = ColumnAttention(16, 4)
        >>> x = torch.randn(1, 3, 5, 16)
        >>> layer(x).shape, layer.matrix(x).shape
        (torch.Size([1, 3, 5, 16]), (5, 4, 3, 3))

    Reference: Jumper et al. 2021, "Highly accurate protein structure prediction with AlphaFold", supplement, algorithm
    8.
    """

    def forward(self, x: Tensor, *, valid: Tensor | None = None) -> Tensor:
        """Apply attention within each column of a table.

        Args:
            x: ``[batch, rows, columns, embed_dim]``.
            valid: bool ``[batch, rows, columns]``: False marks padding, which no token attends to; None if there is no
                padding.

        Returns:
            ``[batch, rows, columns, embed_dim]``. A column without valid tokens gets the bias of the
            output projection.
        """
        self._check(x, valid)
        return self._attend(self.norm(x).transpose(1, 2), None, _transposed(valid)).transpose(1, 2)

    def matrix(self, x: Tensor, *, valid: Tensor | None = None) -> Matrix:
        """Return the lazy attention matrix of each column, ``[columns, batch * num_heads, rows, rows]``; see `forward`.

        Head h of item b is head ``b * num_heads + h``.
        """
        self._check(x, valid)
        return self._matrix(self.norm(x).transpose(1, 2), None, _transposed(valid))


def _transposed(valid: Tensor | None) -> Tensor | None:
    return None if valid is None else valid.transpose(1, 2)


_NODE_PAIRS = ShapeSpec("pairs [batch, n, n, embed_dim]")


class TriangleAttention(TableAttention):
    r"""AlphaFold's triangle attention: pairs of nodes attend to pairs with the same start (or end) node.

    .. math:: \text{start:}\quad A_{ij,k} = \mathrm{softmax}_k\Big(\frac{q_{ij}^\top k_{ik}}{\sqrt{d}} + b_{jk}\Big),
              \qquad
              \text{end:}\quad A_{ij,k} = \mathrm{softmax}_k\Big(\frac{q_{ij}^\top k_{kj}}{\sqrt{d}} + b_{ki}\Big)

    for each head, where :math:`b = \mathrm{norm}(\mathrm{pairs})\, W_B` is a bias from the third side of the triangle.
    As in `RowAttention`, the pair (i, j) is the token in row i and column j, pairs are normalized first, and the gated
    output is meant to be added to them.

    Args:
        embed_dim: width of the pairs.
        num_heads: number of heads; must divide ``embed_dim``.
        around: the node that the pairs share: "start" (pairs of a row) or "end" (pairs of a column).

    Raises:
        ValueError, TypeError: the sizes are incompatible.

    Cost: O(batch · n³ · embed_dim) time and O(batch · n² · (embed_dim + num_heads)) memory.

    Example:
        >>> import torch
        >>> layer, pairs = TriangleAttention(16, 4, around="end"), torch.randn(1, 5, 5, 16)
        >>> layer(pairs).shape, layer.matrix(pairs).shape
        (torch.Size([1, 5, 5, 16]), (5, 4, 5, 5))

    Reference: Jumper et al. 2021, "Highly accurate protein structure prediction with AlphaFold", supplement, algorithms
    13 and 14.
    """

    def __init__(self, embed_dim: int, num_heads: int, around: Literal["start", "end"] = "start"):
        super().__init__(embed_dim, num_heads)
        self.around = check_choice("around", around, ("start", "end"))
        self.bias_projection = nn.Linear(embed_dim, num_heads, bias=False)

    def forward(self, pairs: Tensor, *, valid: Tensor | None = None) -> Tensor:
        """Let each pair attend to the pairs with which it shares its start node, or end node.

        Args:
            pairs: ``[batch, n, n, embed_dim]``.
            valid: bool ``[batch, n, n]``: False marks padding, which no token attends to; None if there is no padding.

        Returns:
            ``[batch, n, n, embed_dim]``. A row without valid tokens gets the bias of the output projection.
        """
        x, bias, valid = self._prepare(pairs, valid)
        return self._swap_if_end(self._attend(x, bias, valid))

    def matrix(self, pairs: Tensor, *, valid: Tensor | None = None) -> Matrix:
        """Return the lazy attention matrix of each node, ``[n, batch * num_heads, n, n]``; see `forward`.

        Head h of item b is head ``b * num_heads + h``. In the matrix of node i, row j is the pair (i, j), and column k
        is the pair (i, k). With "end", they are the pairs (j, i) and (k, i).
        """
        return self._matrix(*self._prepare(pairs, valid))

    def extra_repr(self) -> str:
        return f"{super().extra_repr()}, around={self.around!r}"

    def _prepare(self, pairs: Tensor, valid: Tensor | None) -> tuple[Tensor, Tensor, Tensor | None]:
        """Normalize the pairs, arrange them with one row per shared node, and project them to the bias.

        Return the arranged pairs, the bias, and ``valid`` in the same arrangement.
        """
        self._check(pairs, valid, _NODE_PAIRS)
        x = self._swap_if_end(self.norm(pairs))
        return x, self.bias_projection(x), None if valid is None else self._swap_if_end(valid)

    def _swap_if_end(self, x: Tensor) -> Tensor:
        return x if self.around == "start" else x.transpose(1, 2)
