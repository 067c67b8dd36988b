"""CompressedAttention: self-attention to the last tokens and to compressed entries of earlier blocks (DeepSeek-V4)."""

from __future__ import annotations

from typing import Never

import torch
from torch import Tensor, nn

from saccade.caches import EntryCache, LayerCache
from saccade.engine import dropout
from saccade.masks import Causal, Mask
from saccade.matrix import AttentionMatrix
from saccade.mechanisms.entry_softmax import EntrySoftmax
from saccade.mechanisms.readable_tensors import is_dry_run
from saccade.nn import attention_checks as checks
from saccade.nn.base_layer import AttentionLayer
from saccade.nn.block_compressor import BlockCompressor, BlockReader, EntryIndexer, rotate_end
from saccade.nn.grouped_linear import GroupedLinear
from saccade.nn.norms import RMSNorm
from saccade.nn.projections import weight_of
from saccade.positions import Bias, Rotary
from saccade.positions.token_positions import GivenPositions, Positions
from saccade.support.argument_hints import unexpected_argument
from saccade.support.errors import unsupported, value_error
from saccade.support.torch_modes import CACHED, is_tracing, outside_graph
from saccade.support.validation import check_bool, check_int, check_number, check_type


class CompressedAttention(AttentionLayer):
    r"""Causal self-attention to a window of tokens and to compressed entries of earlier blocks, as in DeepSeek-V4.

    Each block of ``block_size`` tokens is compressed to one *entry* after its last token: a gated average over the
    block. A query reads the keys of the last ``window`` tokens, and the entries of the blocks that end at its position
    or before, in one softmax with a sink logit for each head:

    .. math:: \mathrm{out}_t = R_t^{-1} A_t \,[E;\, K], \qquad
              A_t = \mathrm{softmax}_{\mathrm{sink}}\big(R_t\, \mathrm{norm}(q_t)\, [E;\, K]^\top\big)

    All heads share one key for each token and entry, which is also its value. Keys and entries are rotated, so the
    output is rotated back at the position t of the query.

    ==================================== ================================================================
    compressed sparse attention (CSA)    ``overlap=True`` and ``k``: an indexer selects k entries per query
    heavily compressed attention (HCA)   ``overlap=False``, ``k=None``: large blocks, and all entries
    ==================================== ================================================================

    The columns of the attention matrix are the entries, and then the tokens.

    Args:
        embed_dim: width of the tokens.
        num_heads: number of query heads.
        head_dim: width of the queries and keys of one head, including the rotated part at the end.
        rotary_dim: width of the rotated part.
        block_size: number of tokens in a block, which become one entry.
        window: number of last tokens that a query reads, including its own.
        overlap: whether an entry is an average over its block and the block before.
        k: number of entries that a query reads: those with the highest scores of a `LightningIndexer`; None for all.
        index_heads, index_dim: number and width of the heads of the indexer, which rotates the last ``rotary_dim``
            channels; both None without ``k``.
        query_latent_dim: width of a normalized latent from which queries are computed; None to compute queries from
            the tokens.
        output_groups: number of groups of heads, each of which is first projected separately; None for one projection.
        output_latent_dim: width of a group's projection; None without ``output_groups``.
        rotary: a `saccade.positions.Rotary` of width ``rotary_dim``, or None.
        norm_eps: epsilon of the root-mean-square norms.
        dropout_p: dropout of the attention weights, in training only.

    Raises:
        ValueError: incompatible sizes, or inputs of the wrong width.
        UnsupportedError: a bias, a mask other than Causal and padding on the right, or positions with gaps.

    Cost: projections, and ``len * (window + len / block_size)`` pairs, or ``len * (window + k)`` and the index scores
        of ``len * len / block_size`` pairs. No gradient flows to the indexer. A cache stores ``head_dim / block_size``
        numbers per token, and the window.

    Example:
        >>> csa = {"block_size": 4, "window": 6, "overlap": True, "k": 2, "index_heads": 2, "index_dim": 8}
        >>> layer = CompressedAttention(16, 4, head_dim=8, rotary_dim=4, rotary=Rotary(4), **csa)
        >>> cache, x = layer.new_cache(), torch.randn(1, 30, 16)
        >>> out = torch.cat([layer(x[:, :17], cache=cache), layer(x[:, 17:], cache=cache)], 1)
        >>> torch.allclose(out, layer(x), atol=1e-5), layer.matrix(x).shape
        (True, (1, 4, 30, 37))

    Reference: DeepSeek-AI 2026, DeepSeek-V4, sections 2.3.1 and 2.3.2.
    """

    mechanism: EntrySoftmax

    def __init__(
        self,
        embed_dim: int,
        num_heads: int,
        *,
        head_dim: int,
        rotary_dim: int,
        block_size: int,
        window: int,
        overlap: bool = False,
        k: int | None = None,
        index_heads: int | None = None,
        index_dim: int | None = None,
        query_latent_dim: int | None = None,
        output_groups: int | None = None,
        output_latent_dim: int | None = None,
        rotary: Rotary | None = None,
        norm_eps: float = 1e-6,
        dropout_p: float = 0.0,
    ):
        for name, size in {"embed_dim": embed_dim, "num_heads": num_heads, "head_dim": head_dim}.items():
            check_int(name, size)
        check_int("rotary_dim", rotary_dim, 0, below=head_dim + 1)
        dropout.check(dropout_p)
        checks.check_rotary(rotary, rotary_dim)
        eps = check_number("norm_eps", norm_eps, above=0)
        _check_together({"index_heads": index_heads, "index_dim": index_dim}, "k", k)
        _check_together({"output_latent_dim": output_latent_dim}, "output_groups", output_groups)
        mechanism = EntrySoftmax(block_size, window, k, sink_logit=num_heads)
        super().__init__(embed_dim, num_heads, Causal(), mechanism, dropout_p)
        self.head_dim, self.rotary_dim, self.overlap = head_dim, rotary_dim, check_bool("overlap", overlap)
        self.rotary = rotary
        self.query_latent_projection = self.query_norm = self.indexer = self.output_latent_projection = None
        query_dim = embed_dim
        if query_latent_dim is not None:
            query_dim = check_int("query_latent_dim", query_latent_dim)
            self.query_latent_projection = nn.Linear(embed_dim, query_dim, bias=False)
            self.query_norm = RMSNorm(query_dim, eps)
        self.query_projection = nn.Linear(query_dim, num_heads * head_dim, bias=False)
        self.head_norm = RMSNorm(head_dim, eps, elementwise_affine=False)
        self.key_projection = nn.Linear(embed_dim, head_dim, bias=False)
        self.key_norm = RMSNorm(head_dim, eps)
        self.compressor = BlockCompressor(embed_dim, head_dim, block_size, overlap, eps)
        if index_heads is not None and index_dim is not None:
            check_int("index_dim", index_dim, max(1, rotary_dim))
            compressor = BlockCompressor(embed_dim, index_dim, block_size, overlap, eps)
            self.indexer = EntryIndexer(embed_dim, query_dim, index_heads, index_dim, compressor)
        inner = num_heads * head_dim
        if output_groups is not None and output_latent_dim is not None:
            if num_heads % output_groups:
                raise value_error("output_groups", f"divide num_heads {num_heads}", output_groups)
            self.output_latent_projection = GroupedLinear(inner, output_latent_dim, output_groups)
            inner = output_groups * output_latent_dim
        self.output_projection = nn.Linear(inner, embed_dim, bias=False)
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
        """Apply compressed attention to the tokens.

        Args:
            query: the tokens, ``[batch, len, embed_dim]``; with a cache, only the new tokens.
            mask: padding on the right; combined with Causal by ``&``.
            positions: positions of the tokens, which begin at 0 or continue those in the cache, without gaps; by
                default, they do.
            bias: must be None, because entries have no position of their own.
            cache: the cache of earlier calls of this layer, from `new_cache`.

        Returns:
            ``[batch, len, embed_dim]``.
        """
        if unknown:
            raise unexpected_argument(unknown, self.forward)
        if cache is not None and is_tracing() and not is_dry_run():
            outside = outside_graph(self.forward, CACHED)
            return outside(query, mask=mask, positions=positions, bias=bias, cache=cache)
        heads, key, joined, places, blocks = self._heads(query, mask, positions, bias, cache)
        dropout_p = self.dropout_p if self.training else 0.0
        if cache is None:
            matrix, keys = _full_run(blocks, heads, key, joined)
            out = matrix.matmul(keys, dropout_p=dropout_p)
        else:
            out = cache.attend(blocks, heads, key, key, mask=joined, dropout_p=dropout_p)
        out = rotate_end(self.rotary, out, places.given, is_inverse=True).transpose(1, 2).flatten(2)
        if self.output_latent_projection is not None:
            out = self.output_latent_projection(out)
        return self.output_projection(out)

    def matrix(
        self,
        query: Tensor,
        *,
        mask: object = None,
        positions: GivenPositions = None,
        bias: Tensor | Bias | None = None,
    ) -> AttentionMatrix:
        """Return the lazy attention matrix, ``[batch, num_heads, len, entries + len]``, of entries and tokens."""
        heads, key, joined, _, blocks = self._heads(query, mask, positions, bias, None)
        return _full_run(blocks, heads, key, joined)[0]

    def new_cache(self, max_len: int | None = None) -> EntryCache:
        """Return an empty cache for the keys in the window and the entries of earlier blocks.

        Args:
            max_len: number of tokens to allocate memory for in advance; if None, the cache grows as needed.
        """
        mechanism = self.mechanism
        return EntryCache(mechanism.block_size, mechanism.window, overlap=self.overlap, max_len=max_len)

    def reset_parameters(self) -> None:
        """Initialize all projections with Xavier-uniform weights, and the position biases within a block with zeros."""
        super().reset_parameters()
        for part in (self.compressor, self.indexer, self.output_latent_projection):
            if part is not None:
                part.reset_parameters()

    def extra_repr(self) -> str:
        sizes = f"{self.embed_dim}, num_heads={self.num_heads}, head_dim={self.head_dim}"
        return f"{sizes}, rotary_dim={self.rotary_dim}, dropout_p={self.dropout_p}"

    def _heads(
        self, x: Tensor, mask: object, positions: GivenPositions, bias: Tensor | Bias | None, cache: LayerCache | None
    ) -> tuple[Tensor, Tensor, Mask | None, Positions, BlockReader]:
        """Check and project the inputs of a call.

        Returns:
            The rotated queries, the rotated keys ``[batch, 1, len, head_dim]``, the mask, the positions, and the reader
            that compresses the blocks of this call and attends to their entries.
        """
        if bias is not None:
            self.mechanism.with_bias(bias)  # raises an error
        start = 0 if cache is None else self._start(cache, x, mask)
        weight = weight_of(self.key_projection)
        checks.check_inputs(x, x, x, self.embed_dim, self.embed_dim, None if weight is None else weight.dtype)
        batch, length, _ = x.shape
        joined = self._joined(mask, (batch, self.num_heads, length, start + length))
        places = Positions.between(start, start + length)
        if positions is not None:
            given = Positions.of(positions, length=length, batch=batch)
            if length and given.consecutive_start() != start:
                reason = "blocks are counted from position 0, without gaps; a mask can hide padding on the right"
                raise unsupported("positions", [reason], hint="one text at a time, or masks.Padding(lengths)")
        latent = x
        if self.query_latent_projection is not None and self.query_norm is not None:
            latent = self.query_norm(self.query_latent_projection(x))
        query = self.query_projection(latent).unflatten(2, (self.num_heads, -1)).transpose(1, 2)
        query = rotate_end(self.rotary, self.head_norm(query).to(query.dtype), places.given)
        key = self.key_projection(x)[:, None]
        key = rotate_end(self.rotary, self.key_norm(key).to(key.dtype), places.given)
        parts = self.compressor.project(x)[:, None]
        blocks = BlockReader(self.mechanism, self.compressor, self.rotary, parts)
        if self.indexer is not None:
            index_query, index_weight = self.indexer(x, latent)
            index_query = rotate_end(self.rotary, index_query, places.given)
            parts = torch.cat([parts, self.indexer.compressor.project(x)[:, None]], -1)
            selecting = (self.indexer, index_query, index_weight)
            blocks = BlockReader(self.mechanism, self.compressor, self.rotary, parts, *selecting)
        return query, key, joined, places, blocks

    def _start(self, cache: LayerCache, x: Tensor, mask: object) -> int:
        """Check the cache of a call, and return the position of the first new token."""
        checks.check_with_cache(cache, x, None, None, mask, None, self.embed_dim, positions_unknown=False)
        rule, hint = "be an EntryCache, which stores compressed entries", "new_cache() makes one"
        check_type("cache", cache, EntryCache, rule, hint=hint)
        assert isinstance(cache, EntryCache)
        ours = {"block_size": self.mechanism.block_size, "window": self.mechanism.window, "overlap": self.overlap}
        for name, wanted in ours.items():
            got = getattr(cache, name)
            if got != wanted:
                raise value_error("cache", f"have {name} {wanted}, as the layer", got, hint=hint)
        return cache.length


def _full_run(blocks: BlockReader, query: Tensor, key: Tensor, mask: Mask | None) -> tuple[AttentionMatrix, Tensor]:
    """Return the attention matrix of a run without a cache, and the keys of its columns."""
    entries, index_key = blocks.compress(blocks.parts, 0)
    keys = torch.cat([entries, key], 2)
    return blocks(query, keys, mask=mask, entries=entries.shape[2], index_key=index_key), keys


def _check_together(options: dict[str, int | None], name: str, value: int | None) -> None:
    """Raise an error unless all ``options`` are given if argument ``name`` is, and all are None if it is None."""
    if value is not None:
        check_int(name, value)
    for option, given in options.items():
        if (given is None) != (value is None):
            rule = f"be None without {name}" if value is None else f"be given with {name}"
            raise value_error(option, rule, given)
        if given is not None:
            check_int(option, given)
