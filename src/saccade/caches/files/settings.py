"""Settings of caches as plain values in files, and the caches that are made of them."""

from __future__ import annotations

import dataclasses
from typing import Any

from saccade import positions as encodings
from saccade.caches.block_select import BlockSelectCache
from saccade.caches.cache import LayerCache
from saccade.caches.cross_cache import CrossCache
from saccade.caches.files.contents import Contents, MisfitError
from saccade.caches.heavy_hitter import HeavyHitterCache
from saccade.caches.int8_cache import Int8Cache
from saccade.caches.kv_cache import KVCache
from saccade.caches.scorers import BlockScorer, BoundScorer, MeanScorer
from saccade.caches.sink_window import SinkWindowCache
from saccade.caches.snap_kv import SnapKVCache
from saccade.errors import unsupported

__all__ = ["new_cache", "written"]

_KINDS = {
    kind.__name__: kind
    for kind in (KVCache, BlockSelectCache, SinkWindowCache, HeavyHitterCache, SnapKVCache, Int8Cache, CrossCache)
}
_GROUPED = (BlockSelectCache, HeavyHitterCache, SnapKVCache)  # whose sizes stand in a group of their own
_SCORERS: dict[str, type[BlockScorer]] = {kind.__name__: kind for kind in (MeanScorer, BoundScorer)}
_SCALINGS: dict[str, type[encodings.Scaling]] = {
    kind.__name__: kind for kind in (encodings.Linear, encodings.NTK, encodings.Llama3, encodings.YaRN)
}


def written(cache: LayerCache, where: str) -> dict[str, Any]:
    """The kind and the settings of a cache.

    Raises:
        UnsupportedError: a cache, or a part of one, that a file cannot name.
    """
    kind = type(cache).__name__
    if _KINDS.get(kind) is not type(cache):
        reason = "it is none of the caches that hold tokens, or one of your own"
        raise unsupported(where, kind, [reason], hint="read the text anew, with a cache that can be saved")
    settings = {name: getattr(cache, name) for name in cache.settings}
    if "scorer" in settings:
        scorer = type(settings["scorer"]).__name__
        if _SCORERS.get(scorer) is not type(settings["scorer"]):
            reason = f"its scorer {scorer} is one of your own, and a file holds no code"
            raise unsupported(where, kind, [reason], hint="MeanScorer() and BoundScorer() can be saved")
        settings["scorer"] = scorer
    rotary = settings.get("rotary")
    if rotary is not None:
        told: dict[str, Any] = {word: getattr(rotary, word) for word in ("head_dim", "base", "rotary_dim", "layout")}
        scaling = rotary.scaling
        told["scaling"] = None if scaling is None else [type(scaling).__name__, dataclasses.asdict(scaling)]
        settings["rotary"] = told
    if not isinstance(cache, _GROUPED):
        return {"kind": kind, **settings}
    apart: dict[str, Any] = {name: settings.pop(name) for name in ("scorer", "max_len") if name in settings}
    return {"kind": kind, "settings": settings} | apart


def new_cache(contents: Contents) -> LayerCache:
    """An empty cache of the kind and with the settings that a file says."""
    kind = _KINDS.get(contents.kind)
    if kind is None:
        raise MisfitError("tells of a cache of another kind")
    group = contents.part("settings") if kind in _GROUPED else contents
    settings: dict[str, Any] = {}
    for name in kind.settings:
        if name == "max_len":
            settings[name] = contents.count_or_none(name, 1)
        elif name == "scorer":
            scorer = contents.value(name)
            if not isinstance(scorer, str) or scorer not in _SCORERS:
                raise contents.misfit(name)
            settings[name] = _SCORERS[scorer]()
        elif name == "rotary":
            settings[name] = None if contents.value(name) is None else _rotary(contents.part(name))
        else:
            settings[name] = group.count(name)
    return kind(**settings)


def _rotary(contents: Contents) -> encodings.Rotary:
    scaling: encodings.Scaling | None = None
    if contents.value("scaling") is not None:
        match contents.value("scaling"):
            case [str(kind), dict(words)] if kind in _SCALINGS and all(map(_is_word, words.values())):
                scaling = _SCALINGS[kind](**words)
            case _:
                raise contents.misfit("scaling")
    sizes = {name: contents.count(name) for name in ("head_dim", "rotary_dim")}
    base, layout = contents.value("base"), contents.value("layout")
    if not isinstance(layout, str):
        raise contents.misfit("layout")
    return encodings.Rotary(**sizes, base=base, layout=layout, scaling=scaling)  # type: ignore[arg-type]  # it looks


def _is_word(value: object) -> bool:
    """Whether a setting may be a scaling's: a number that a tensor can be multiplied by, a switch, or none."""
    return value is None or isinstance(value, bool | float) or (isinstance(value, int) and abs(value) < 1 << 53)
