"""How each kind of cache is made anew of what a file tells of it."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from saccade import positions as encodings
from saccade.caches.block_select import BlockSelectCache
from saccade.caches.cross_cache import CrossCache
from saccade.caches.eviction import HeavyHitterCache, Held, SnapKVCache
from saccade.caches.file_contents import FLOATS, MisfitError, Told, check_room
from saccade.caches.int8_cache import Int8Cache, Rounded
from saccade.caches.kv_cache import KVCache
from saccade.caches.layer_cache import LayerCache
from saccade.caches.model_cache import Cache
from saccade.caches.places import Places
from saccade.caches.scorers import BlockScorer, BoundScorer, MeanScorer
from saccade.caches.sink_window import SinkWindowCache

__all__ = ["SCORERS", "made_of"]

SCORERS: dict[str, type[BlockScorer]] = {"MeanScorer": MeanScorer, "BoundScorer": BoundScorer}
_SCALINGS: dict[str, type[encodings.Scaling]] = {
    "Linear": encodings.Linear,
    "NTK": encodings.NTK,
    "Llama3": encodings.Llama3,
    "YaRN": encodings.YaRN,
}
_DEEPEST = 16  # Caches in one another
_WIDE = (torch.float32, torch.float64)


def made_of(tree: object, name: str, tensors: dict[str, Tensor], depth: int = 0) -> Cache | LayerCache:
    """A cache as a file tells of it; nothing that it says is believed unseen.

    Raises:
        MisfitError: no cache that was saved could have been told so.
    """
    told = Told(tree, name, tensors)
    if told.kind == "Cache":
        layers = told.value("layers")
        if depth == _DEEPEST or not isinstance(layers, list) or not layers:
            raise told.misfit("layers")
        return Cache(made_of(layer, f"{name}{i}.", tensors, depth + 1) for i, layer in enumerate(layers))
    if told.kind not in _READERS:
        raise MisfitError("tells of a cache of another kind")
    try:
        return _READERS[told.kind](told)
    except (ValueError, TypeError, NotImplementedError) as error:  # what a cache says of the sizes it is given
        raise MisfitError(f"cannot be a {told.kind} ({str(error).partition(chr(10))[0]})") from None


def _all(told: Told) -> LayerCache:
    return _with_columns(KVCache(told.count_or_none("max_len", 1)), told)


def _selecting(told: Told) -> LayerCache:
    scorer = told.value("scorer")
    if not isinstance(scorer, str) or scorer not in SCORERS:
        raise told.misfit("scorer")
    names = ("block_size", "budget", "sink_blocks", "local_blocks", "rescore_every")
    settings = told.part("settings").counts(*names)
    cache = BlockSelectCache(**settings, scorer=SCORERS[scorer](), max_len=told.count_or_none("max_len", 1))
    length, like = 0, tuple[int, ...]()
    if told.value("first") is not None:
        key, _ = told.pair()
        length, like = key.shape[2], tuple(key.shape[:2])
    exact_until, age = told.count_or_none("exact_until", 0, length), told.count("age")
    ranking = told.tensor("ranking", (*like, None), _WIDE) if told.has("ranking") else None
    if ranking is not None and ranking.shape[2] > length // cache.block_size:
        raise told.misfit("ranking")
    _with_columns(cache, told)
    cache.exact_until, cache.ranking = exact_until, (ranking, age)
    return cache


def _with_columns(cache: KVCache, told: Told) -> KVCache:
    if told.value("first") is None:
        return cache
    first, (key, value) = told.place("first"), told.pair()
    length, block = key.shape[2], cache.block_size if isinstance(cache, BlockSelectCache) else 1
    check_room(told, key, value, max(length, cache.max_len or 0) + block)
    is_run = not told.has("positions")
    positions = range(first, first + length) if is_run else told.table("positions", (key.shape[0], length))
    cache.fill(key, value, positions=positions)
    return cache


def _with_context(told: Told) -> LayerCache:
    cross = CrossCache()
    if not told.has("key"):
        return cross
    (key, value), where = told.pair(), told.value("kv_positions")
    positions: range | Tensor | None = None
    if told.has("kv_positions"):
        x = told.tensors[f"{told.name}kv_positions"]
        positions = told.table("kv_positions", (key.shape[2],) if x.dim() == 1 else (None, key.shape[2]))
    elif where is not None:
        is_range = isinstance(where, list) and len(where) == 3 and all(type(x) is int for x in where)
        if not is_range or not where[2] or max(map(abs, where)) > 1 << 40:
            raise told.misfit("kv_positions")
        positions = range(*where)
    cross.fill(key, value, kv_positions=positions)
    cross._has_been_read, cross._is_new = True, False  # what follows is no longer new
    return cross


def _with_ring(told: Told) -> SinkWindowCache:
    rotary = None if told.value("rotary") is None else _rotary(told.part("rotary"))
    cache = SinkWindowCache(told.count("sink_tokens"), told.count("window", 1), rotary=rotary)
    length, is_run = told.place("length"), told.value("is_run")
    if not isinstance(is_run, bool):
        raise told.misfit("is_run")
    if not told.has("keys"):
        if length or told.count("next", 0, 0) or not is_run:
            raise told.misfit("length")
        return cache
    slots = cache.sink_tokens + cache.window
    keys, values = told.pair(("keys", "values"), columns=slots)
    held = {"keys": keys, "values": values}
    if rotary is not None and rotary.head_dim != keys.shape[3]:
        raise told.misfit("rotary")
    if rotary is not None and cache.sink_tokens:
        held["sinks"] = told.tensor("sinks", (*keys.shape[:2], cache.sink_tokens, keys.shape[3]), (keys.dtype,))
    is_shared = told.has("table") and told.tensors[f"{told.name}table"].shape[:1] == (1,)
    held["table"] = table = told.table("table", (1 if is_shared else keys.shape[0], slots))
    after = told.upcoming(keys.shape[0], table)
    if isinstance(after, Tensor):
        held["next"] = after
    # Each position has a slot of its own; where tokens stand one by one, it is known which ones are there.
    slot = torch.arange(slots, device=table.device)
    is_wrong = (table >= 0) & (cache._slot(table) != slot)
    if is_run:
        is_wrong |= table != _newest(slot, length, cache)
    if bool(is_wrong.any()) or not length or (is_run and (isinstance(after, Tensor) or after != length)):
        raise told.misfit("table")
    following = -1 if isinstance(after, Tensor) else after
    cache._restore(held, {"length": length, "next": following, "is_run": is_run})
    return cache


def _newest(slot: Tensor, length: int, cache: SinkWindowCache) -> Tensor:
    """The last of the positions 0, 1, 2, … below ``length`` that is kept in each slot; -1 where none was."""
    later = slot + (length - 1 - slot).div(cache.window, rounding_mode="floor") * cache.window
    last = torch.where(slot < cache.sink_tokens, slot, later)
    return torch.where(slot < length, last, -1)


def _rotary(told: Told) -> encodings.Rotary:
    scaling: encodings.Scaling | None = None
    if told.value("scaling") is not None:
        match told.value("scaling"):
            case [str(kind), dict(words)] if kind in _SCALINGS and all(map(_is_word, words.values())):
                scaling = _SCALINGS[kind](**words)
            case _:
                raise told.misfit("scaling")
    sizes, base, layout = told.counts("head_dim", "rotary_dim"), told.value("base"), told.value("layout")
    if not isinstance(layout, str):
        raise told.misfit("layout")
    return encodings.Rotary(**sizes, base=base, layout=layout, scaling=scaling)  # type: ignore[arg-type]  # it looks


def _is_word(value: object) -> bool:
    """Whether a setting may be a scaling's: a number that a tensor can be multiplied by, a switch, or none."""
    return value is None or isinstance(value, bool | float) or (isinstance(value, int) and abs(value) < 1 << 53)


def _with_evicting(told: Told) -> LayerCache:
    settings = told.part("settings")
    cache: HeavyHitterCache | SnapKVCache
    if told.kind == "HeavyHitterCache":
        cache = HeavyHitterCache(settings.count("budget"), recent=settings.count("recent"))
    else:
        cache = SnapKVCache(**settings.counts("budget", "window", "pool"))
    length = told.place("length")
    if not told.has("table"):
        if length or told.count("next", 0, 0):
            raise told.misfit("length")
        return cache
    key, value = told.pair()
    wide = (torch.float64 if key.dtype == torch.float64 else torch.float32,)
    received, table = told.tensor("received", key.shape[:3], wide), told.table("table", key.shape[:3])
    earlier, later = table[..., :-1], table[..., 1:]
    is_wrong = bool(((earlier >= 0) & (later <= earlier)).any())  # padding, and then one behind the other
    is_large = isinstance(cache, HeavyHitterCache) and key.shape[2] > cache.budget
    if is_wrong or is_large or length < max(1, key.shape[2]):
        raise told.misfit("table")
    cache._held = Held(key, value, table, received)
    cache._length, cache._next = length, told.upcoming(len(key), table)
    return cache


def _with_eight_bits(told: Told) -> Int8Cache:
    cache = Int8Cache(told.count("block_size", 1))
    first, length = told.place("first"), told.count("length")
    if not told.has("key.codes"):
        if length:
            raise told.misfit("length")
        return cache
    full, left = divmod(length, cache.block_size)
    cache._keys = _rounded(told, "key", (None, None), full, left)
    cache._values = _rounded(told, "value", cache._keys.rest.shape[:2], full, left)
    if cache._keys.rest.dtype != cache._values.rest.dtype:
        raise told.misfit("dtype")
    batch = len(cache._keys.rest)
    places = Places.of(told.table("positions", (batch, length))) if told.has("positions") else Places(first, length)
    cache._places = places
    return cache


def _rounded(told: Told, which: str, alike: Sequence[int | None], full: int, left: int) -> Rounded:
    """Keys or values of ``full`` blocks, and of ``left`` columns more."""
    rest = told.tensor(f"{which}.rest", (*alike, left, None), FLOATS)
    batch, heads, _, width = rest.shape
    if not heads:
        raise told.misfit(f"tensor {which}.rest")
    wide = (torch.float64 if rest.dtype == torch.float64 else torch.float32,)
    size = told.count("block_size", 1)
    codes = told.tensor(f"{which}.codes", (batch, heads, full * size, width), (torch.int8,))
    return Rounded(codes, told.tensor(f"{which}.steps", (batch, heads, full, width), wide), rest)


_READERS: dict[str, Callable[[Told], LayerCache]] = {
    "KVCache": _all,
    "BlockSelectCache": _selecting,
    "SinkWindowCache": _with_ring,
    "HeavyHitterCache": _with_evicting,
    "SnapKVCache": _with_evicting,
    "Int8Cache": _with_eight_bits,
    "CrossCache": _with_context,
}
