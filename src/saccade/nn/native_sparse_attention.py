"""NativeSparseAttention: self-attention with three gated branches (block means, selected blocks and a window)."""

from __future__ import annotations

from functools import partial
from typing import Never

from torch import Tensor, nn

from saccade.caches import CrossCache, LayerCache
from saccade.masks import Causal, Mask
from saccade.matrix import Matrix
from saccade.mechanisms import NativeSparse
from saccade.mechanisms.readable_tensors import is_dry_run
from saccade.nn import attention_checks as checks
from saccade.nn.attention_heads import Heads
from saccade.nn.base_layer import AttentionLayer
from saccade.nn.projections import weight_of
from saccade.positions import Bias, Rotary
from saccade.positions.token_positions import GivenPositions, Positions
from saccade.support.argument_hints import unexpected_argument
from saccade.support.errors import unsupported, value_error
from saccade.support.torch_modes import CACHED, is_tracing, outside_graph
from saccade.support.validation import check_bool, check_type


class NativeSparseAttention(AttentionLayer):
    r"""Causal self-attention with three gated branches: block means, selected blocks and a sliding window.

    .. math:: \mathrm{out} = W_O\, \mathrm{Concat}_h\big(A_h V_h\big), \qquad
              A_h = g_1^h A^{\mathrm{cmp}}_h + g_2^h A^{\mathrm{slc}}_h + g_3^h A^{\mathrm{win}}_h, \qquad
              g = \sigma(W_G x)

    For the branches, see `saccade.mechanisms.NativeSparse`. Each token has a gate for each branch and head.

    Args:
        embed_dim: width of the tokens.
        num_heads: number of query heads.
        num_kv_heads: number of key and value heads; must divide ``num_heads``; ``num_heads`` if None. Query heads that
            share a key head also share their selected blocks.
        head_dim: width of a head; ``embed_dim / num_heads`` if None.
        mechanism: the sizes of blocks and window; ``NativeSparse()`` if None.
        mask: the layer's mask; combined with Causal and with the mask of each call by ``&``.
        rotary: a `saccade.positions.Rotary` for queries and keys, or None. Blocks are means of rotated keys.
        dropout_p: dropout of the attention weights, in training only.
        projection_bias: whether the projections of queries, keys, values and output have a bias.

    Raises:
        TypeError: the mechanism is not a NativeSparse.
        ValueError: sizes do not divide evenly, or inputs have the wrong width.
        UnsupportedError: a bias, a mask other than Causal and padding on the right, or positions with gaps, such as
            those of a ragged batch.

    Cost: five projections, plus the mechanism.

    Example:
        >>> layer = NativeSparseAttention(16, 4, num_kv_heads=2, mechanism=NativeSparse(4, 2, 6))
        >>> x = torch.randn(1, 20, 16)
        >>> cache = layer.new_cache()
        >>> out = torch.cat([layer(x[:, :13], cache=cache), layer(x[:, 13:], cache=cache)], 1)
        >>> torch.allclose(out, layer(x), atol=1e-5), layer.matrix(x).shape
        (True, (1, 4, 20, 20))

    Reference: Yuan et al. 2025, arXiv:2502.11089, section 3.
    """

    mechanism: NativeSparse

    def __init__(
        self,
        embed_dim: int,
        num_heads: int,
        *,
        num_kv_heads: int | None = None,
        head_dim: int | None = None,
        mechanism: NativeSparse | None = None,
        mask: Mask | None = None,
        rotary: Rotary | None = None,
        dropout_p: float = 0.0,
        projection_bias: bool = False,
    ):
        num_kv_heads = num_heads if num_kv_heads is None else num_kv_heads
        width = checks.check_sizes(embed_dim, num_heads, num_kv_heads, embed_dim, head_dim, dropout_p)
        mechanism = NativeSparse() if mechanism is None else mechanism
        check_type("mechanism", mechanism, NativeSparse, "be a NativeSparse or None", hint="NativeSparse(64, 16, 512)")
        super().__init__(embed_dim, num_heads, mask, mechanism, dropout_p)
        self.mask = Causal() if mask is None else mask if mask.is_causal else Causal() & mask
        self.num_kv_heads, self.head_dim = num_kv_heads, width
        checks.check_rotary(rotary, width)
        self.rotary: nn.Module | None = rotary
        has_bias, inner, kv_inner = (
            check_bool("projection_bias", projection_bias),
            num_heads * width,
            num_kv_heads * width,
        )
        self.query_projection = nn.Linear(embed_dim, inner, bias=has_bias)
        self.key_projection = nn.Linear(embed_dim, kv_inner, bias=has_bias)
        self.value_projection = nn.Linear(embed_dim, kv_inner, bias=has_bias)
        self.branch_projection = nn.Linear(embed_dim, 3 * num_heads, bias=False)
        self.output_projection = nn.Linear(inner, embed_dim, bias=has_bias)
        self.reset_parameters()

    def forward(
        self,
        query: Tensor,
        *,
        mask: object = None,
        positions: GivenPositions = None,
        bias: Tensor | Bias | None = None,
        cache: LayerCache | None = None,
        **unknown: Never,
    ) -> Tensor:
        """Apply native sparse attention to the tokens.

        Args:
            query: the tokens, ``[batch, len, embed_dim]``; with a cache, only the new tokens.
            mask: padding on the right; combined with the layer's own mask by ``&``.
            positions: positions of the tokens, without gaps; by default, they begin at 0 or continue those in the
                cache.
            bias: must be None, because the branches have different scores.
            cache: the cache of earlier calls of this layer, from `new_cache`.

        Returns:
            ``[batch, len, embed_dim]``.
        """
        if unknown:
            raise unexpected_argument(unknown, self.forward)
        if cache is not None and is_tracing() and not is_dry_run():
            outside = outside_graph(self.forward, CACHED)
            return outside(query, mask=mask, positions=positions, bias=bias, cache=cache)
        q, k, v, joined, places, _ = self._heads(query, mask, positions, bias, cache)
        compute_matrix = partial(self.mechanism, gates=self._gates(query))
        dropout_p = self.dropout_p if self.training else 0.0
        if cache is None:
            matrix = compute_matrix(q, k, mask=joined, q_positions=places, kv_positions=places)
            out = matrix.matmul(v, dropout_p=dropout_p)
        else:
            out = cache.attend(compute_matrix, q, k, v, mask=joined, positions=places, dropout_p=dropout_p)
        return self.output_projection(out.transpose(1, 2).flatten(2))

    def matrix(
        self,
        query: Tensor,
        *,
        mask: object = None,
        positions: GivenPositions = None,
        bias: Tensor | Bias | None = None,
    ) -> Matrix:
        """Return the gated sum of the three branches as a lazy matrix, ``[batch, num_heads, len, len]``."""
        q, k, _, joined, places, _ = self._heads(query, mask, positions, bias, None)
        return self.mechanism(q, k, gates=self._gates(query), mask=joined, q_positions=places, kv_positions=places)

    def extra_repr(self) -> str:
        sizes = f"{self.embed_dim}, num_heads={self.num_heads}, num_kv_heads={self.num_kv_heads}"
        return f"{sizes}, mask={self.mask}, dropout_p={self.dropout_p}"

    def _gates(self, x: Tensor) -> Tensor:
        """Return the weights of the branches for each head and token, ``[batch, num_heads, len, 3]``."""
        return self.branch_projection(x).sigmoid().unflatten(2, (self.num_heads, 3)).transpose(1, 2)

    def _heads(
        self, x: Tensor, mask: object, positions: GivenPositions, bias: object, cache: LayerCache | None
    ) -> Heads:
        """Check the inputs of a call, project them to heads, and rotate queries and keys."""
        if bias is not None:
            raise unsupported("bias", ["the branches have different scores, so a bias has no single meaning"])
        if isinstance(cache, CrossCache):
            rule, hint = "be that of a self-attention", "new_cache() makes one"
            raise value_error("cache", rule, type(cache).__name__, hint=hint)
        if cache is not None:
            checks.check_with_cache(cache, x, None, None, mask, None, self.embed_dim, positions_unknown=False)
        weight = weight_of(self.query_projection)
        checks.check_inputs(x, x, x, self.embed_dim, self.embed_dim, None if weight is None else weight.dtype)
        batch, length, _ = x.shape
        cached_len = 0 if cache is None else cache.length
        joined = self._joined(mask, (batch, self.num_heads, length, cached_len + length))
        places = None if positions is None else Positions.of(positions, length=length, batch=batch)
        if cache is not None:
            places = checks.check_causal(joined, cache.positions(length) if places is None else places.given, cache)
        projections = (self.query_projection, self.key_projection, self.value_projection)
        q, k, v = (project(x).unflatten(2, (-1, self.head_dim)).transpose(1, 2) for project in projections)
        if self.rotary is not None:
            rotary_positions = (Positions.between(0, length) if places is None else places).given
            q, k = self.rotary(q, rotary_positions), self.rotary(k, rotary_positions)
        return Heads(q, k, v, joined, places, places)
