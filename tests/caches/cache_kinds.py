"""The kinds of caches, for heads of width 4; most of those that hold keys for softmax let some of a dozen tokens go."""

from collections.abc import Callable

import torch
from torch import Tensor

from saccade.caches import (
    BlockSelectCache,
    CompressiveCache,
    CrossCache,
    EntryCache,
    HeavyHitterCache,
    IndexedCache,
    IndexedLatentCache,
    Int8Cache,
    KVCache,
    LatentCache,
    LayerCache,
    QuantizedCache,
    RecurrentCache,
    SegmentCache,
    SinkWindowCache,
    SnapKVCache,
)
from saccade.caches.call_arguments import MakesMatrix
from saccade.mechanisms import CompressiveMemory, Delta, Linear, Softmax, TopK
from saccade.mechanisms.entry_softmax import EntrySoftmax
from saccade.nn.block_compressor import BlockCompressor, BlockReader
from saccade.positions import Rotary
from saccade.scorers import LightningIndexer

KINDS: dict[str, Callable[[], LayerCache]] = {
    "all": KVCache,
    "blocks": lambda: BlockSelectCache(2, 6),
    "ranked seldom": lambda: BlockSelectCache(2, 6, rescore_every=2),
    "heavy": lambda: HeavyHitterCache(6),
    "snap": lambda: SnapKVCache(6, window=3),
    "8 bits": lambda: Int8Cache(4),
    "2 bits": lambda: QuantizedCache(2, 4),
    "window": lambda: SinkWindowCache(2, 5),
    "segments": lambda: SegmentCache(4, 3),
    "turned": lambda: SinkWindowCache(2, 5, rotary=Rotary(4)),
}

EVERY_KIND: dict[str, Callable[[], LayerCache]] = KINDS | {
    "sparse": lambda: BlockSelectCache(2, 6, prompt="sparse"),
    "sums": RecurrentCache,
    "delta rule": RecurrentCache,
    "remembered": CompressiveCache,
    "latents": lambda: LatentCache(3),
    "indexed": IndexedCache,
    "indexed latents": lambda: IndexedLatentCache(3),
    "entries": lambda: EntryCache(4, 5, overlap=True),
    "context": CrossCache,
}


def mechanism_of(name: str, n: int) -> MakesMatrix:
    """Return a mechanism for ``n`` new tokens, two batch items and two key heads, which a kind of cache supports."""
    if name.startswith("indexed"):
        return TopK(LightningIndexer(torch.randn(2, 3, n, 2), torch.randn(2, 1, n, 2), torch.randn(2, 3, n)), 3)
    if name == "entries":
        compressor = BlockCompressor(4, 4, 4, True, 1e-6)
        return BlockReader(EntrySoftmax(4, 5), compressor, None, torch.randn(2, 2, n, compressor.parts_dim))
    special = {"sums": Linear, "remembered": lambda: CompressiveMemory(4, 3), "delta rule": Delta}
    return special.get(name, Softmax)()


def value_of(name: str, key: Tensor, value: Tensor) -> Tensor:
    """Return the values that a kind of cache supports: some store only keys."""
    return key[..., :3] if name.endswith("latents") else key if name == "entries" else value
