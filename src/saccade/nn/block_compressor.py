"""Parts of compressed attention, which make an entry from each block of tokens, score entries and attend to them."""

from __future__ import annotations

import dataclasses

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from saccade.matrix import AttentionMatrix
from saccade.mechanisms.entry_softmax import EntrySoftmax
from saccade.nn.base_layer import Layer
from saccade.nn.norms import RMSNorm
from saccade.positions import Rotary
from saccade.positions.token_positions import GivenPositions
from saccade.scorers import LightningIndexer
from saccade.support.numerics import wide_dtype
from saccade.support.torch_modes import is_tracing


class BlockCompressor(Layer):
    r"""A layer that compresses each block of tokens to one entry: a gated average with a softmax over the block.

    .. math:: e = \mathrm{norm}\Big(\sum_j \frac{\exp(g_j + b_j)}{\sum_{j'} \exp(g_{j'} + b_{j'})} \odot c_j\Big)

    where :math:`c_j` and :math:`g_j` are projections of token j of the block, and :math:`b_j` is a bias for its place
    in the block. Each channel has its own softmax. With ``overlap``, each token has two contents and gates: one for the
    entry of the next block, and one for the entry of its own. An entry is then an average over two blocks.

    Args:
        embed_dim: width of the tokens.
        width: width of an entry.
        block_size: number of tokens in a block.
        overlap: whether an entry also averages over the block before its own.
        norm_eps: epsilon of the norm.
    """

    def __init__(self, embed_dim: int, width: int, block_size: int, overlap: bool, norm_eps: float):
        super().__init__()
        self.width, self.block_size, self.overlap = width, block_size, overlap
        channels = 2 * width if overlap else width
        self.content_projection = nn.Linear(embed_dim, channels, bias=False)
        self.gate_projection = nn.Linear(embed_dim, channels, bias=False)
        self.position_bias = nn.Parameter(torch.zeros(block_size, channels))
        self.norm = RMSNorm(width, norm_eps)

    @property
    def parts_dim(self) -> int:
        """Width of a projected token: its contents and gates."""
        return 2 * self.position_bias.shape[1]

    def project(self, x: Tensor) -> Tensor:
        """Return the contents and gates of tokens, ``[batch, len, parts_dim]``."""
        return torch.cat([self.content_projection(x), self.gate_projection(x)], -1)

    def forward(self, parts: Tensor, first: int) -> Tensor:
        """Return the entries of all complete blocks in ``parts``, ``[batch, heads, blocks, width]``.

        Args:
            parts: projected tokens, ``[batch, heads, len, parts_dim]``. With ``overlap`` and ``first > 0``, they begin
                with the block before the first one.
            first: index in the sequence of the first block to compress.
        """
        size = self.block_size
        count = parts.shape[2] // size
        if not is_tracing() and count == (self.overlap and first > 0):  # most steps finish no block
            return parts[:, :, :0, : self.width]
        blocks = parts[:, :, : count * size].unflatten(2, (count, size))
        content, gate = blocks.chunk(2, -1)
        gate = gate.to(wide_dtype(gate.dtype)) + self.position_bias
        if self.overlap:
            content, gate = (
                _with_previous(x, fill, has_previous=first > 0) for x, fill in ((content, 0.0), (gate, -torch.inf))
            )
        weights = gate.softmax(3).to(content.dtype)
        return self.norm((content * weights).sum(3)).to(parts.dtype)

    def reset_parameters(self) -> None:
        """Initialize the projections with Xavier-uniform weights, and the position biases with zeros."""
        for projection in (self.content_projection, self.gate_projection):
            nn.init.xavier_uniform_(projection.weight)
        nn.init.zeros_(self.position_bias)

    def extra_repr(self) -> str:
        return f"width={self.width}, block_size={self.block_size}, overlap={self.overlap}"


def _with_previous(x: Tensor, fill: float, *, has_previous: bool) -> Tensor:
    """Put the tokens of the block before in front of each block's own tokens, so that an entry averages over both.

    The block before contributes the first half of its channels, and the block itself the second half.

    Args:
        x: ``[batch, heads, blocks, size, 2 * width]``.
        fill: the value in place of a block before the first one.
        has_previous: whether the first block serves only as the one before the second, without a result of its own.

    Returns:
        ``[batch, heads, blocks, 2 * size, width]``, or one block fewer with ``has_previous``.
    """
    earlier, own = x.chunk(2, -1)
    if not has_previous:
        return torch.cat([F.pad(earlier, (0, 0, 0, 0, 1, 0), value=fill)[:, :, :-1], own], 3)
    return torch.cat([earlier[:, :, :-1], own[:, :, 1:]], 3)


class EntryIndexer(Layer):
    """A lightning indexer for entries: narrow queries, and a compressor that makes a narrow key for each entry.

    Args:
        embed_dim: width of the tokens.
        query_dim: width of the latents from which index queries are projected.
        num_heads: number of index heads.
        head_dim: width of an index head.
        compressor: makes the index keys, of width ``head_dim``.
    """

    def __init__(self, embed_dim: int, query_dim: int, num_heads: int, head_dim: int, compressor: BlockCompressor):
        super().__init__()
        self.head_dim, self.compressor = head_dim, compressor
        self.query_projection = nn.Linear(query_dim, num_heads * head_dim, bias=False)
        self.weight_projection = nn.Linear(embed_dim, num_heads, bias=False)

    def forward(self, x: Tensor, latent: Tensor) -> tuple[Tensor, Tensor]:
        """Return the index queries, ``[batch, num_heads, len, head_dim]``, and their weights, without the last axis."""
        query = self.query_projection(latent).unflatten(2, (-1, self.head_dim)).transpose(1, 2)
        return query, self.weight_projection(x).mT

    def reset_parameters(self) -> None:
        """Initialize the projections with Xavier-uniform weights."""
        for projection in (self.query_projection, self.weight_projection):
            nn.init.xavier_uniform_(projection.weight)
        self.compressor.reset_parameters()


@dataclasses.dataclass(frozen=True)
class BlockReader:
    """One call of compressed attention, which compresses blocks and attends to them for `saccade.caches.EntryCache`.

    Args:
        softmax: the mechanism of the layer.
        compressor: makes the entries.
        rotary: rotates the last channels of entries, or None.
        parts: the projected new tokens of the compressor, and after them those of the indexer's, if there is one,
            ``[batch, 1, len, width]``.
        indexer, index_query, index_weight: the indexer, and its rotated queries and weights; None without an indexer.
    """

    softmax: EntrySoftmax
    compressor: BlockCompressor
    rotary: Rotary | None
    parts: Tensor
    indexer: EntryIndexer | None = None
    index_query: Tensor | None = None
    index_weight: Tensor | None = None

    def compress(self, parts: Tensor, first: int) -> tuple[Tensor, Tensor | None]:
        """Return the rotated entries of all complete blocks in ``parts``, and their index keys (or None).

        An entry has the position of the first token of its block. See `saccade.caches.entry_cache.CompressesBlocks`.
        """
        width = self.compressor.parts_dim
        entries = self._rotated(self.compressor(parts[..., :width], first), first)
        if self.indexer is None:
            return entries, None
        return entries, self._rotated(self.indexer.compressor(parts[..., width:], first), first)

    def __call__(
        self,
        query: Tensor,
        key: Tensor,
        *,
        mask: object,
        q_positions: GivenPositions = None,
        kv_positions: GivenPositions = None,
        entries: int = 0,
        start: int | None = None,
        index_key: Tensor | None = None,
        window_first: bool = False,
    ) -> AttentionMatrix:
        """Return the softmax matrix over entries and tokens; see `EntrySoftmax.forward`."""
        indexer: LightningIndexer | None = None
        if index_key is not None and self.index_query is not None and self.index_weight is not None:
            indexer = LightningIndexer(self.index_query, index_key, self.index_weight)
        matrix: AttentionMatrix = self.softmax(
            query,
            key,
            mask=mask,
            q_positions=q_positions,
            kv_positions=kv_positions,
            entries=entries,
            start=start,
            indexer=indexer,
            window_first=window_first,
        )
        return matrix

    def _rotated(self, entries: Tensor, first: int) -> Tensor:
        """Rotate entries, or their index keys, by the position of the first token of each block."""
        size, stop = self.compressor.block_size, first + entries.shape[2]
        if self.rotary is None or (not is_tracing() and stop == first):
            return entries
        if is_tracing():  # a range would fix the length in the graph
            return rotate_end(self.rotary, entries, size * torch.arange(first, stop, device=entries.device))
        return rotate_end(self.rotary, entries, range(first * size, stop * size, size))


def rotate_end(rotary: Rotary | None, x: Tensor, positions: range | Tensor, *, is_inverse: bool = False) -> Tensor:
    """Apply a rotary encoding, if any, to the last channels of ``x [batch, heads, len, width]``, or undo it."""
    if rotary is None:
        return x
    plain, part = x.split([x.shape[3] - rotary.head_dim, rotary.head_dim], -1)
    turn = rotary.unrotate if is_inverse else rotary
    return torch.cat([plain, turn(part, positions)], -1)
