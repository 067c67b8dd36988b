"""Caches that store keys and values (or sums of them), so that attention layers need not recompute them."""

from typing import TYPE_CHECKING

from saccade.caches.block_select import BlockSelectCache
from saccade.caches.cache import LayerCache
from saccade.caches.call_arguments import Call, MakesMatrix, Traffic
from saccade.caches.compressive_cache import CompressiveCache
from saccade.caches.cross_cache import CrossCache
from saccade.caches.entry_cache import EntryCache
from saccade.caches.eviction import EvictingCache, HeavyHitterCache, SnapKVCache, StoredTokens
from saccade.caches.files.prefix_store import PrefixStore, fingerprint
from saccade.caches.files.serialize import load_cache, save_cache
from saccade.caches.indexed_cache import IndexedCache
from saccade.caches.indexed_latent_cache import IndexedLatentCache
from saccade.caches.int8_cache import Int8Cache
from saccade.caches.kv_cache import KVCache
from saccade.caches.latent_cache import LatentCache
from saccade.caches.model_cache import Cache
from saccade.caches.padded_positions import padded_positions
from saccade.caches.quantized_cache import QuantizedCache
from saccade.caches.recurrent import RecurrentCache
from saccade.caches.ring_buffer import SegmentCache
from saccade.caches.sink_window import SinkWindowCache
from saccade.caches.state_tensors import Leaf
from saccade.support.name_hints import other_names

if not TYPE_CHECKING:
    __getattr__ = other_names(__name__)

__all__ = [
    "LayerCache",
    "Leaf",
    "Call",
    "KVCache",
    "LatentCache",
    "IndexedCache",
    "IndexedLatentCache",
    "SinkWindowCache",
    "SegmentCache",
    "BlockSelectCache",
    "EvictingCache",
    "StoredTokens",
    "HeavyHitterCache",
    "SnapKVCache",
    "Int8Cache",
    "QuantizedCache",
    "RecurrentCache",
    "CompressiveCache",
    "EntryCache",
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
