"""Caches of tensors without values (fake, meta): the shapes and sizes of a run with values, or one clear message."""

from collections.abc import Callable
from contextlib import AbstractContextManager

import pytest
import torch
from tests.caches.cache_kinds import EVERY_KIND, mechanism_of, value_of
from torch._subclasses import FakeTensorMode

from saccade import caches, masks
from saccade.caches import (
    LayerCache,
    padded_positions,
)
from saccade.support.errors import UnsupportedError

MODES: dict[str, Callable[[], AbstractContextManager[object]]] = {
    "fake": FakeTensorMode,
    "meta": lambda: torch.device("meta"),
}
UNREADABLE = "whose values cannot be read here\nHint: pass a range"
REFUSED = {"remembered": "the open segment follows from positions, and fake and meta tensors have no values"}
REFUSED_WITH_PADDING = {
    "sparse": "it has padding or explicit positions",
    "entries": "blocks are counted from position 0, without gaps",
    "sums": UNREADABLE,
    "delta rule": UNREADABLE,
    "remembered": UNREADABLE,
}


def _run(name: str, *, has_padding: bool = False) -> tuple[list[torch.Size], list[object]]:
    """Return the shapes of the outputs of several calls, and the sizes of the cache after each of them."""
    cache, shapes, sizes = EVERY_KIND[name](), [], []
    for n in (9, 1, 4, 1):
        q, k, v = (torch.randn(2, heads, n, 4) for heads in (4, 2, 2))
        tensors = (q, k, value_of(name, k, v))
        tensors = (q,) if name == "context" and cache.length else tensors
        where = padded_positions([9, 7]) if has_padding and not cache.length else None
        shapes.append(cache.attend(mechanism_of(name, n), *tensors, mask=masks.Causal(), positions=where).shape)
        read = (
            None if name.startswith("indexed") else cache.traffic.bytes_read
        )  # the number of selected keys is a value
        sizes.append((cache.length, cache.nbytes, read, cache.traffic.bytes_appended))
        cache = cache.fork()
        cache.reorder([1, 0])
    cache.crop(0)
    return shapes, sizes


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("name", EVERY_KIND)
def test_shapes_and_sizes_do_not_need_values(name: str, mode: str) -> None:
    expected = _run(name)
    with MODES[mode]():
        if name in REFUSED:
            with pytest.raises(UnsupportedError, match=REFUSED[name]):
                _run(name)
        else:
            assert _run(name) == expected


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("name", EVERY_KIND)
def test_shapes_do_not_need_the_positions_of_padding(name: str, mode: str) -> None:
    if name in REFUSED_WITH_PADDING:
        with MODES[mode](), pytest.raises(UnsupportedError, match=REFUSED_WITH_PADDING[name]):
            _run(name, has_padding=True)
    else:
        shapes, _ = _run(name, has_padding=True)
        with MODES[mode]():
            assert _run(name, has_padding=True)[0] == shapes


def test_every_kind_of_cache_has_a_case() -> None:
    kinds = {x for x in vars(caches).values() if isinstance(x, type) and issubclass(x, LayerCache)}
    assert kinds - {LayerCache, caches.EvictingCache} == {type(make()) for make in EVERY_KIND.values()}
