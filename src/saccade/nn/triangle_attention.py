"""TriangleAttention: pairs of nodes attend to pairs that share a node."""

from __future__ import annotations

from typing import Literal

from torch import Tensor, nn

from saccade.matrix import Matrix
from saccade.nn.row_column_attention import TableAttention
from saccade.support.validation import ShapeSpec, check_choice

_PAIRS = ShapeSpec("pairs [batch, n, n, embed_dim]")


class TriangleAttention(TableAttention):
    r"""Attention from pairs of nodes to pairs with the same start (or end), with a bias from the third side.

    .. math:: \text{start:}\quad A_{ij,k} = \mathrm{softmax}_k\Big(\frac{q_{ij}^\top k_{ik}}{\sqrt{d}} + b_{jk}\Big),
              \qquad
              \text{end:}\quad A_{ij,k} = \mathrm{softmax}_k\Big(\frac{q_{ij}^\top k_{kj}}{\sqrt{d}} + b_{ki}\Big)

    for each head, with :math:`b = \mathrm{norm}(\mathrm{pairs})\, W_B`. Otherwise it is
    like `RowAttention`: the pair (i, j) is the token in row i and column j; pairs are normed first, and the gated
        output
    is to be added to them.

    Args:
        embed_dim: width of the pairs.
        num_heads: divides ``embed_dim``.
        around: the node that pairs share: "start" (pairs of a row) or "end" (pairs of a column).

    Raises:
        ValueError, TypeError: sizes that do not fit.

    Cost: O(batch · n³ · embed_dim) time; memory O(batch · n² · (embed_dim + num_heads)).

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
        """Apply attention to the pairs.

        Args:
            pairs: ``[batch, n, n, embed_dim]``.
            valid: bool ``[batch, n, n]``: False at padding, which is not attended to; None for no padding.

        Returns:
            ``[batch, n, n, embed_dim]``. It is the output's bias if a row has no tokens.
        """
        x, bias, valid = self._prepare(pairs, valid)
        return self._around(self._attend(x, bias, valid))

    def matrix(self, pairs: Tensor, *, valid: Tensor | None = None) -> Matrix:
        """Return the lazy matrix of each node, ``[n, batch * num_heads, n, n]``; see `forward`.

        Head h of item b is head ``b * num_heads + h``. Around node i, row j is the pair (i, j) and column k the pair
        (i, k); with "end", they are the pairs (j, i) and (k, i).
        """
        return self._matrix(*self._prepare(pairs, valid))

    def extra_repr(self) -> str:
        return f"{super().extra_repr()}, around={self.around!r}"

    def _prepare(self, pairs: Tensor, valid: Tensor | None) -> tuple[Tensor, Tensor, Tensor | None]:
        """Return the normed pairs with a row for each shared node, the bias of a row, and ``valid``."""
        self._check(pairs, valid, _PAIRS)
        x = self._around(self.norm(pairs))
        return x, self.bias_projection(x), None if valid is None else self._around(valid)

    def _around(self, x: Tensor) -> Tensor:
        return x if self.around == "start" else x.transpose(1, 2)
