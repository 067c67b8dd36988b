"""AttentionBlock: attention with dropout, a residual connection and a layer norm."""

from __future__ import annotations

from typing import TypedDict, Unpack

from torch import Tensor, nn

from saccade.caches import LayerCache
from saccade.masks import Mask
from saccade.matrix import Matrix
from saccade.mechanisms import Mechanism
from saccade.nn.attention import MultiHeadAttention
from saccade.nn.base_layer import Layer
from saccade.positions import Bias, Rotary
from saccade.positions.token_positions import GivenPositions
from saccade.support.argument_hints import ArgumentHints


class _CallOptions(TypedDict, total=False):
    """The keyword arguments of an attention block's calls, all None by default."""

    mask: object
    positions: GivenPositions
    kv_positions: GivenPositions
    bias: Tensor | Bias | None


class AttentionBlock(ArgumentHints, Layer):
    """A post-norm block: ``LayerNorm(query + Dropout(attention(query, key, value)))``.

    ``block(x)`` is self-attention, and ``block(x, context)`` is the cross-attention of a decoder.

    Args:
        embed_dim, num_heads, num_kv_heads, context_dim, mask: see `MultiHeadAttention`.
        mechanism, rotary, projection_bias: see `MultiHeadAttention`.
        dropout_p: dropout of the attention weights and of the attention output, in training only.

    Example:
        >>> import torch
        >>> block = AttentionBlock(16, 4, context_dim=8)
        >>> block(torch.zeros(2, 3, 16), torch.zeros(2, 7, 8)).shape
        torch.Size([2, 3, 16])

    Reference: Vaswani et al. 2017, arXiv:1706.03762, section 3.1.
    """

    def __init__(
        self,
        embed_dim: int,
        num_heads: int,
        *,
        num_kv_heads: int | None = None,
        context_dim: int | None = None,
        mask: Mask | None = None,
        mechanism: Mechanism | None = None,
        rotary: Rotary | None = None,
        dropout_p: float = 0.0,
        projection_bias: bool = True,
    ):
        super().__init__()
        self.attention = MultiHeadAttention(
            embed_dim,
            num_heads,
            num_kv_heads=num_kv_heads,
            context_dim=context_dim,
            mask=mask,
            mechanism=mechanism,
            rotary=rotary,
            dropout_p=dropout_p,
            projection_bias=projection_bias,
        )
        self.dropout = nn.Dropout(dropout_p)
        self.norm = nn.LayerNorm(embed_dim)

    def forward(
        self,
        query: Tensor,
        key: Tensor | None = None,
        value: Tensor | None = None,
        *,
        mask: object = None,
        positions: GivenPositions = None,
        kv_positions: GivenPositions = None,
        bias: Tensor | Bias | None = None,
        cache: LayerCache | None = None,
    ) -> Tensor:
        """Return the block's output, ``[batch, q_len, embed_dim]``; see `MultiHeadAttention.forward`."""
        options = {"mask": mask, "positions": positions, "kv_positions": kv_positions, "bias": bias}
        return self._add(query, self.attention(query, key, value, cache=cache, **options))

    def matrix(self, query: Tensor, key: Tensor | None = None, **kwargs: Unpack[_CallOptions]) -> Matrix:
        """Return the block's lazy attention matrix. For the arguments, see `forward`."""
        return self.attention.matrix(query, key, **kwargs)

    def with_weights(
        self, query: Tensor, key: Tensor | None = None, value: Tensor | None = None, **kwargs: Unpack[_CallOptions]
    ) -> tuple[Tensor, Tensor]:
        """Return the block's output and weights ``[batch, num_heads, q_len, kv_len]``; see `MultiHeadAttention`."""
        attended, weights = self.attention.with_weights(query, key, value, **kwargs)
        return self._add(query, attended), weights

    def _add(self, query: Tensor, attended: Tensor) -> Tensor:
        return self.norm(query + self.dropout(attended))
