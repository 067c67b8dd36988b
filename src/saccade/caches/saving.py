"""Caches as files: what each kind writes."""

from __future__ import annotations

import dataclasses
import os
from typing import Any

import torch
from torch import Tensor

from saccade.caches.block_select import BlockSelectCache
from saccade.caches.checks import checked_path
from saccade.caches.cross_cache import CrossCache
from saccade.caches.eviction import HeavyHitterCache, SnapKVCache
from saccade.caches.file_contents import MisfitError
from saccade.caches.files import encoded, read_tensors, write_whole
from saccade.caches.int8_cache import Int8Cache
from saccade.caches.kv_cache import KVCache
from saccade.caches.layer_cache import LayerCache
from saccade.caches.loading import SCORERS, made_of
from saccade.caches.model_cache import Cache
from saccade.caches.sink_window import SinkWindowCache
from saccade.errors import type_error, unsupported, value_error

__all__ = ["load_cache", "save_cache"]

_KIND = "cache"
_Tree = dict[str, Any]


def save_cache(cache: Cache | LayerCache, path: str | os.PathLike[str], *, fingerprint: str | None = None) -> None:
    """Write a cache to a file, to go on from it later or in another process.

    The file is in safetensors format and never pickled. It is written beside its place and renamed when it is whole: a
    process that is killed leaves the old file or the new one.

    Args:
        cache: of a layer or a model.
        path: the file.
        fingerprint: of the model that made it, from `fingerprint`; `load_cache` then asks for the same.

    Raises:
        TypeError: not a cache, or not a path.
        UnsupportedError: a cache, or a scorer, that a file cannot hold.
        ImportError: safetensors is not installed.
        OSError: the file cannot be written.

    Cost: a copy of what is held, on the disk.

    Example:
        >>> import pathlib, tempfile
        >>> import torch
        >>> from saccade import caches, mechanisms
        >>> cache, x = caches.KVCache(), torch.randn(1, 2, 5, 8)
        >>> out = cache.attend(mechanisms.Softmax(), x, x, x)
        >>> path = pathlib.Path(tempfile.mkdtemp()) / "text.cache"
        >>> save_cache(cache, path)
        >>> load_cache(path)
        KVCache(max_len=None, length=5, nbytes=2048)
    """
    where = "save_cache"
    if not isinstance(cache, Cache | LayerCache):
        raise type_error(where, "cache", "be a cache of a layer or a model", type(cache).__name__)
    file = checked_path(where, "path", path)
    _check_fingerprint(where, fingerprint)
    tensors: dict[str, Tensor] = {}
    tree = _written(cache, "", tensors, where)
    write_whole(file, encoded(where, tensors, {"kind": _KIND, "fingerprint": fingerprint, "cache": tree}))


def load_cache(
    path: str | os.PathLike[str], *, fingerprint: str | None = None, device: torch.device | str = "cpu"
) -> Cache | LayerCache:
    """Read what `save_cache` wrote.

    Args:
        path: the file.
        fingerprint: of the model that is to go on from it; must be what the file was saved with.
        device: where the cache is to be.

    Returns:
        A cache of the same kind that goes on as if it had never been away.

    Raises:
        ImportError: safetensors is not installed.
        TypeError: not a path.
        ValueError: no file; one that is truncated, damaged, not a cache, of another version or for another model; or
            one that tells of a cache which could not be: nothing is made of it then.
    """
    where = "load_cache"
    file = checked_path(where, "path", path)
    _check_fingerprint(where, fingerprint)
    tensors, about = read_tensors(where, file, _KIND)
    held = about.get("fingerprint")
    if held != fingerprint:
        rule = "be that which the file was saved with" if held else "be None, as when the file was saved"
        hint = "other weights or another configuration make other keys and values: read the text anew"
        got = "none" if fingerprint is None else "that of another model"
        raise value_error(where, "fingerprint", rule, got, hint=hint if fingerprint and held else "see fingerprint()")
    try:
        return made_of(about.get("cache"), "", {name: x.to(device) for name, x in tensors.items()})
    except MisfitError as misfit:
        # Its checksum fits: no chance damaged it, and something else than save_cache wrote it.
        rule = "be a file of a cache, as save_cache writes it"
        raise value_error(where, "path", rule, f"one that {misfit}") from None


def _check_fingerprint(where: str, fingerprint: object) -> None:
    if fingerprint is not None and (not isinstance(fingerprint, str) or not fingerprint):
        hint = "caches.fingerprint(model)"
        raise type_error(where, "fingerprint", "be a string or None", type(fingerprint).__name__, hint=hint)


def _written(cache: Cache | LayerCache, name: str, tensors: dict[str, Tensor], where: str) -> _Tree:
    """What describes a cache; its tensors are added under names that begin with ``name``."""
    if isinstance(cache, Cache):
        layers = [_written(layer, f"{name}{i}.", tensors, where) for i, layer in enumerate(cache)]
        return {"kind": "Cache", "layers": layers}
    if type(cache) in (KVCache, BlockSelectCache):
        assert isinstance(cache, KVCache)
        tree = {"kind": type(cache).__name__, "max_len": cache.max_len, **_columns(cache, name, tensors)}
        return tree | (_selection(cache, name, tensors, where) if isinstance(cache, BlockSelectCache) else {})
    if type(cache) is SinkWindowCache:
        return _ring(cache, name, tensors)
    if type(cache) is CrossCache:
        return _context(cache, name, tensors)
    if type(cache) in (HeavyHitterCache, SnapKVCache):
        assert isinstance(cache, HeavyHitterCache | SnapKVCache)
        return _evicting(cache, name, tensors)
    if type(cache) is Int8Cache:
        return _eight_bits(cache, name, tensors)
    reason = "it is none of the caches that hold tokens, or one of your own"
    raise unsupported(where, type(cache).__name__, [reason], hint="read the text anew, with a cache that can be saved")


def _columns(cache: KVCache, name: str, tensors: dict[str, Tensor]) -> _Tree:
    if cache.key is None or cache.value is None or not cache.length:
        return {"first": None}
    tensors[f"{name}key"], tensors[f"{name}value"] = cache.key, cache.value
    if isinstance(cache.kv_positions, Tensor):
        tensors[f"{name}positions"] = cache.kv_positions
        return {"first": 0}
    return {"first": cache.kv_positions.start}


def _selection(cache: BlockSelectCache, name: str, tensors: dict[str, Tensor], where: str) -> _Tree:
    scorer = type(cache.scorer).__name__
    if type(cache.scorer) not in SCORERS.values():
        reason = f"its scorer {scorer} is one of your own, and a file holds no code"
        raise unsupported(where, "BlockSelectCache", [reason], hint="MeanScorer() and BoundScorer() can be saved")
    names = ("block_size", "budget", "sink_blocks", "local_blocks", "rescore_every")
    settings = {name: getattr(cache, name) for name in names}
    ranking, age = cache.ranking
    if ranking is not None:
        tensors[f"{name}ranking"] = ranking
    return {"settings": settings, "scorer": scorer, "exact_until": cache.exact_until, "age": age}


def _ring(cache: SinkWindowCache, name: str, tensors: dict[str, Tensor]) -> _Tree:
    rotary = cache.rotary
    tree: _Tree = {"kind": "SinkWindowCache", "sink_tokens": cache.sink_tokens, "window": cache.window, "rotary": None}
    if rotary is not None:
        scaling = rotary.scaling
        tree["rotary"] = {
            "head_dim": rotary.head_dim,
            "base": rotary.base,
            "rotary_dim": rotary.rotary_dim,
            "layout": rotary.layout,
            "scaling": None if scaling is None else [type(scaling).__name__, dataclasses.asdict(scaling)],  # type: ignore[call-overload]
        }
    for own, x in cache._tensors().items():
        tensors[f"{name}{own}"] = x
    return tree | cache._counts()


def _evicting(cache: HeavyHitterCache | SnapKVCache, name: str, tensors: dict[str, Tensor]) -> _Tree:
    names = ("budget", "recent") if isinstance(cache, HeavyHitterCache) else ("budget", "window", "pool")
    tree: _Tree = {"kind": type(cache).__name__, "settings": {own: getattr(cache, own) for own in names}}
    for own, x in {} if cache._held is None else cache._held._asdict().items():
        tensors[f"{name}{own}"] = x
    return tree | _reached(cache._length, cache._next, name, tensors)


def _eight_bits(cache: Int8Cache, name: str, tensors: dict[str, Tensor]) -> _Tree:
    for which, held in (("key", cache._keys), ("value", cache._values)):
        for own, x in {} if held is None else held._asdict().items():
            tensors[f"{name}{which}.{own}"] = x
    where = cache._places
    if where.table is not None:
        tensors[f"{name}positions"] = where.table
    return {"kind": "Int8Cache", "block_size": cache.block_size, "first": where.first, "length": where.length}


def _reached(length: int, upcoming: int | Tensor, name: str, tensors: dict[str, Tensor]) -> _Tree:
    """How many columns were seen, and where the next token stands."""
    if isinstance(upcoming, Tensor):
        tensors[f"{name}next"] = upcoming
    return {"length": length, "next": -1 if isinstance(upcoming, Tensor) else upcoming}


def _context(cache: CrossCache, name: str, tensors: dict[str, Tensor]) -> _Tree:
    where = cache.kv_positions
    if cache.key is not None and cache.value is not None:
        tensors[f"{name}key"], tensors[f"{name}value"] = cache.key, cache.value
        if isinstance(where, Tensor):
            tensors[f"{name}kv_positions"] = where
    is_range = isinstance(where, range)
    return {"kind": "CrossCache", "kv_positions": [where.start, where.stop, where.step] if is_range else None}  # type: ignore[union-attr]
