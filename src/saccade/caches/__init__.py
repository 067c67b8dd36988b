"""What a layer remembers of the tokens it has seen, so that the next ones need not begin anew."""

from saccade.caches.block_select import BlockSelectCache
from saccade.caches.cross_cache import CrossCache
from saccade.caches.eviction import HeavyHitterCache, SnapKVCache
from saccade.caches.fingerprint import fingerprint
from saccade.caches.int8_cache import Int8Cache
from saccade.caches.kv_cache import KVCache
from saccade.caches.layer_cache import LayerCache, MakesMatrix, Traffic
from saccade.caches.model_cache import Cache
from saccade.caches.prefix_store import PrefixStore
from saccade.caches.ragged import padded_positions
from saccade.caches.recurrent import RecurrentCache
from saccade.caches.saving import load_cache, save_cache
from saccade.caches.scorers import BlockScorer, BoundScorer, MeanScorer
from saccade.caches.sink_window import SinkWindowCache

__all__ = [
    "LayerCache",
    "KVCache",
    "SinkWindowCache",
    "BlockSelectCache",
    "HeavyHitterCache",
    "SnapKVCache",
    "Int8Cache",
    "BlockScorer",
    "BoundScorer",
    "MeanScorer",
    "RecurrentCache",
    "CrossCache",
    "Cache",
    "Traffic",
    "MakesMatrix",
    "padded_positions",
    "save_cache",
    "load_cache",
    "PrefixStore",
    "fingerprint",
]
