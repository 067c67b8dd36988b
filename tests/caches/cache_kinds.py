"""The kinds of caches that hold keys for softmax, for heads of width 4; most let some of a dozen tokens go."""

from collections.abc import Callable

from saccade.caches import (
    BlockSelectCache,
    HeavyHitterCache,
    Int8Cache,
    KVCache,
    LayerCache,
    QuantizedCache,
    SegmentCache,
    SinkWindowCache,
    SnapKVCache,
)
from saccade.positions import Rotary

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
