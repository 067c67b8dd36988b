"""Save a cache's settings, numbers and tensors to a file, and load them again."""

from __future__ import annotations

import dataclasses
import os
from typing import Any

import torch
from torch import Tensor

from saccade import positions as encodings
from saccade.caches.block_select import BlockSelectCache
from saccade.caches.cache import LayerCache
from saccade.caches.compressive_cache import CompressiveCache
from saccade.caches.cross_cache import CrossCache
from saccade.caches.entry_cache import EntryCache
from saccade.caches.eviction import HeavyHitterCache, SnapKVCache
from saccade.caches.files.file_contents import Contents, MisfitError
from saccade.caches.files.tensor_files import checked_path, encoded, read_tensors, write_whole
from saccade.caches.indexed_cache import IndexedCache
from saccade.caches.indexed_latent_cache import IndexedLatentCache
from saccade.caches.int8_cache import Int8Cache
from saccade.caches.kv_cache import KVCache
from saccade.caches.latent_cache import LatentCache
from saccade.caches.model_cache import Cache
from saccade.caches.quantized_cache import QuantizedCache
from saccade.caches.recurrent import RecurrentCache
from saccade.caches.ring_buffer import SegmentCache
from saccade.caches.sink_window import SinkWindowCache
from saccade.scorers import BlockBounds, BlockMeans, BlockScorer
from saccade.support.errors import type_error, unsupported, value_error

_KIND = "cache"
_MAX_DEPTH = 16  # largest nesting depth of Caches
_KINDS = {
    kind.__name__: kind
    for kind in (
        KVCache,
        LatentCache,
        IndexedCache,
        IndexedLatentCache,
        BlockSelectCache,
        SinkWindowCache,
        SegmentCache,
        HeavyHitterCache,
        SnapKVCache,
        Int8Cache,
        QuantizedCache,
        CompressiveCache,
        EntryCache,
        RecurrentCache,
        CrossCache,
    )
}
_GROUPED = (BlockSelectCache, HeavyHitterCache, SnapKVCache)  # their sizes form a group in the file
_SCORERS: dict[str, type[BlockScorer]] = {kind.__name__: kind for kind in (BlockMeans, BlockBounds)}
_SCALINGS: dict[str, type[encodings.Scaling]] = {
    kind.__name__: kind
    for kind in (encodings.Linear, encodings.NTK, encodings.Llama3, encodings.YaRN, encodings.Frequencies)
}


def save_cache(cache: Cache | LayerCache, path: str | os.PathLike[str], *, fingerprint: str | None = None) -> None:
    """Write a cache to a file, to continue from it later or in another process.

    The file is in safetensors format, without pickle. It is written under a temporary name and then renamed, so if
    the process is killed, either the old or the new file remains.

    Args:
        cache: the cache of a layer or a model.
        path: the file.
        fingerprint: the `fingerprint` of the model that computed the cache. `load_cache` then requires the same one.

    Raises:
        TypeError: ``cache`` is not a cache, or ``path`` is not a path.
        UnsupportedError: the cache or its scorer cannot be saved to a file.
        ImportError: safetensors is not installed.
        OSError: the file cannot be written.

    Cost: disk space for a copy of the contents.

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
    if not isinstance(cache, Cache | LayerCache):
        raise type_error("cache", "be a cache of a layer or a model", type(cache).__name__)
    file = checked_path("path", path)
    _check_fingerprint(fingerprint)
    tensors: dict[str, Tensor] = {}
    tree = _describe(cache, "", tensors)
    write_whole(file, encoded(tensors, {"kind": _KIND, "fingerprint": fingerprint, "cache": tree}))


def load_cache(
    path: str | os.PathLike[str], *, fingerprint: str | None = None, device: torch.device | str = "cpu"
) -> Cache | LayerCache:
    """Load a cache from a file that `save_cache` wrote.

    Args:
        path: the file.
        fingerprint: the `fingerprint` of the model that will use the cache; must equal the one in the file.
        device: the device of the cache.

    Returns:
        A cache of the same type and with the same contents as the saved one.

    Raises:
        ImportError: safetensors is not installed.
        TypeError: ``path`` is not a path.
        ValueError: the file is missing, truncated or damaged, is not a cache, is from a different version or for a
            different model, or describes a cache that cannot exist.
    """
    file = checked_path("path", path)
    _check_fingerprint(fingerprint)
    tensors, about = read_tensors(file, _KIND)
    saved = about.get("fingerprint")
    if saved != fingerprint:
        rule = "equal the fingerprint in the file" if saved else "be None, because the file has no fingerprint"
        hint = "keys and values depend on the weights and the configuration: run the model on the text again"
        got = "none" if fingerprint is None else "the fingerprint of another model"
        raise value_error("fingerprint", rule, got, hint=hint if fingerprint and saved else "see fingerprint()")
    try:
        return _load_layer(about.get("cache"), "", {name: x.to(device) for name, x in tensors.items()})
    except MisfitError as misfit:
        # The checksum matches, so the file is not damaged, but save_cache did not write it.
        rule = "be a cache file written by save_cache"
        raise value_error("path", rule, f"a file that {misfit}") from None


def _check_fingerprint(fingerprint: object) -> None:
    if fingerprint is not None and (not isinstance(fingerprint, str) or not fingerprint):
        hint = "caches.fingerprint(model)"
        raise type_error("fingerprint", "be a string or None", type(fingerprint).__name__, hint=hint)


def _describe(cache: Cache | LayerCache, name: str, tensors: dict[str, Tensor]) -> dict[str, Any]:
    """Return a cache's JSON description, and add its tensors to ``tensors`` under names that begin with ``name``."""
    if isinstance(cache, Cache):
        layers = [_describe(layer, f"{name}{i}.", tensors) for i, layer in enumerate(cache)]
        return {"kind": "Cache", "layers": layers}
    settings = _settings(cache)
    numbers, state = cache.state()
    tensors.update({name + leaf: x for leaf, x in state.items()})
    return settings | numbers


def _load_layer(tree: object, name: str, tensors: dict[str, Tensor], depth: int = 0) -> Cache | LayerCache:
    """Return the cache that a file describes, after checking every part.

    Raises:
        MisfitError: no saved cache could have this description.
    """
    contents = Contents(tree, name, tensors)
    if contents.kind == "Cache":
        layers = contents.value("layers")
        if depth == _MAX_DEPTH or not isinstance(layers, list) or not layers:
            raise contents.misfit("layers")
        return Cache(_load_layer(layer, f"{name}{i}.", tensors, depth + 1) for i, layer in enumerate(layers))
    try:
        cache = _new_cache(contents)
        cache.restore(contents)
    except (ValueError, TypeError, NotImplementedError) as error:  # the cache rejects the sizes
        raise MisfitError(f"cannot be a {contents.kind} ({str(error).partition(chr(10))[0]})") from None
    return cache


def _settings(cache: LayerCache) -> dict[str, Any]:
    """Return the type and the settings of a cache as JSON.

    Raises:
        UnsupportedError: the cache, its scorer or its rotary encoding is of a type that files do not support.
    """
    kind = type(cache).__name__
    if _KINDS.get(kind) is not type(cache):
        reason = "it is a custom cache class, and a file contains no code"
        raise unsupported(kind, [reason], hint="run the model on the text again with a cache that can be saved")
    settings = {name: getattr(cache, name) for name in cache.settings}
    if "scorer" in settings:
        scorer = type(settings["scorer"]).__name__
        if _SCORERS.get(scorer) is not type(settings["scorer"]):
            reason = f"its scorer {scorer} is a custom class, and a file contains no code"
            raise unsupported(kind, [reason], hint="BlockMeans() and BlockBounds() can be saved")
        settings["scorer"] = scorer
    rotary = settings.get("rotary")
    if rotary is not None:
        if type(rotary) is not encodings.Rotary:
            raise unsupported(
                kind, [f"its rotary is a {type(rotary).__name__}, whose tables cannot be saved in a cache file"]
            )
        arguments: dict[str, Any] = {
            word: getattr(rotary, word) for word in ("head_dim", "base", "rotary_dim", "layout")
        }
        scaling: Any = rotary.scaling
        arguments["scaling"] = None if scaling is None else [type(scaling).__name__, dataclasses.asdict(scaling)]
        settings["rotary"] = arguments
    if not isinstance(cache, _GROUPED):
        return {"kind": kind, **settings}
    ungrouped: dict[str, Any] = {
        name: settings.pop(name) for name in ("scorer", "prompt", "max_len") if name in settings
    }
    return {"kind": kind, "settings": settings} | ungrouped


def _new_cache(contents: Contents) -> LayerCache:
    """Return an empty cache with the type and settings from a file."""
    kind = _KINDS.get(contents.kind)
    if kind is None:
        raise MisfitError("describes a cache of an unknown kind")
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
        elif name == "prompt":
            prompt = contents.value(name)
            if prompt not in ("dense", "sparse"):
                raise contents.misfit(name)
            settings[name] = prompt
        elif name == "overlap":
            settings[name] = contents.value(name)  # the cache requires a bool
        elif name == "rotary":
            settings[name] = None if contents.value(name) is None else _rotary(contents.part(name))
        else:
            settings[name] = group.count(name)
    return kind(**settings)


def _rotary(contents: Contents) -> encodings.Rotary:
    scaling: encodings.Scaling | None = None
    if contents.value("scaling") is not None:
        match contents.value("scaling"):
            case [str(kind), dict(words)] if kind in _SCALINGS and all(map(_is_scaling_setting, words.values())):
                scaling = _SCALINGS[kind](**words)
            case _:
                raise contents.misfit("scaling")
    sizes = {name: contents.count(name) for name in ("head_dim", "rotary_dim")}
    base, layout = contents.value("base"), contents.value("layout")
    if not isinstance(layout, str):
        raise contents.misfit("layout")
    return encodings.Rotary(**sizes, base=base, layout=layout, scaling=scaling)  # type: ignore[arg-type]  # it checks


def _is_scaling_setting(value: object) -> bool:
    """Return whether a value from a cache file may be a setting of rotary scaling.

    Such a setting is a number, a list of floats, a bool or None.
    """
    if isinstance(value, list):
        return all(isinstance(number, float) for number in value)
    return value is None or isinstance(value, bool | float) or (isinstance(value, int) and abs(value) < 1 << 53)
