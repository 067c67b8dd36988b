"""Every number in a cache file is checked, and every value up to its limit is accepted."""

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from saccade import masks
from saccade.caches import (
    BlockSelectCache,
    Cache,
    CompressiveCache,
    CrossCache,
    HeavyHitterCache,
    KVCache,
    LayerCache,
    SinkWindowCache,
    SnapKVCache,
    files,
    load_cache,
    padded_positions,
    save_cache,
)
from saccade.mechanisms import CompressiveMemory, Softmax
from saccade.positions import Rotary, YaRN
from saccade.scorers import BlockBounds, BlockMeans, BlockScorer

CAUSAL, MEMORY = masks.Causal(), CompressiveMemory(4, 5)
KINDS: dict[str, Callable[[], LayerCache]] = {
    "all": KVCache,
    "heavy": lambda: HeavyHitterCache(8),
    "snap": lambda: SnapKVCache(8, window=3),
    "window": lambda: SinkWindowCache(2, 5),
    "turned": lambda: SinkWindowCache(2, 5, rotary=Rotary(8, scaling=YaRN(2.0, trained_len=9))),
    "memory": CompressiveCache,
}
REFUSED = r"^load_cache: path must be a cache file written by save_cache; got a file that "


def _filled(cache: LayerCache, lengths: list[int], positions: object = None) -> LayerCache:
    """Return a cache with a prompt of these lengths, ragged if they differ."""
    where = padded_positions(lengths, side="left") if positions is None and len(set(lengths)) > 1 else positions
    mechanism = MEMORY if isinstance(cache, CompressiveCache) else Softmax()
    q, k, v = (torch.randn(len(lengths), heads, max(lengths), 8) for heads in (4, 2, 2))
    with torch.no_grad():
        cache.attend(mechanism, q, k, v, mask=CAUSAL, positions=where)
    return cache


def _crafted(
    folder: Path, cache: LayerCache | Cache, craft: Callable[[dict[str, Any], dict[str, Tensor]], object]
) -> Path:
    """Return the file of a cache after a change, with a valid checksum."""
    save_cache(cache, folder / "cache")
    tensors, about = files.read_tensors(folder / "cache", "cache")
    craft(about["cache"], tensors)
    about = {"kind": "cache", "fingerprint": None, "cache": about["cache"]}
    files.write_whole(folder / "cache", files.encoded(tensors, about))
    return folder / "cache"


def _read_again(cache: LayerCache, folder: Path) -> LayerCache:
    save_cache(cache, folder / "cache")
    return load_cache(folder / "cache")


ALIKE, RAGGED = [20, 20], [20, 13]
CRAFTED: dict[str, tuple[str, list[int], Callable[[dict[str, Any], dict[str, Tensor]], object]]] = {
    "the last token is still to come": ("heavy", ALIKE, lambda tree, tensors: tree.update(next=tree["next"] - 1)),
    "the last tokens are still to come": ("heavy", RAGGED, lambda tree, tensors: tensors["next"].sub_(1)),
    "one end for two": ("heavy", RAGGED, lambda tree, tensors: tensors.update(next=tensors["next"][:1])),
    "half a token": ("heavy", ALIKE, lambda tree, tensors: tree.update(length=20.5)),
    "nothing, and keys": ("all", ALIKE, lambda tree, tensors: tree.update(first=None)),
    "one row of places for two": (
        "all", RAGGED, lambda tree, tensors: tensors.update(positions=tensors["positions"][:1])
    ),
    "places beyond all": ("all", RAGGED, lambda tree, tensors: tensors["positions"].add_(2**41)),
    "one place beyond all": ("all", [1], lambda tree, tensors: tensors["positions"].fill_(2**40 + 1)),
    "four rows of places for two": (
        "memory", RAGGED, lambda tree, tensors: tensors.update(table=tensors["table"].repeat(2, 1))
    ),
    "places below nobody's": (
        "memory", RAGGED, lambda tree, tensors: tensors["table"].masked_fill_(tensors["table"] == -1, -2)
    ),
    "two of the last tokens exchanged": (
        "memory", ALIKE, lambda tree, tensors: tensors.update(table=tensors["table"][:, [0, 2, 1, 3, 4]])
    ),
    "wide values": ("all", ALIKE, lambda tree, tensors: tensors.update(value=tensors["value"].double())),
    "wider sums": ("snap", ALIKE, lambda tree, tensors: tensors.update(received=tensors["received"].double())),
    "a whole number that floats do not tell from the next": (
        "turned", ALIKE, lambda tree, tensors: tree["rotary"]["scaling"][1].update(attention_factor=2**53)
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", CRAFTED)
def test_impossible_values_are_refused(name: str, tmp_path: Path) -> None:
    kind, lengths, craft = CRAFTED[name]
    cache = _filled(KINDS[kind](), lengths, torch.full((1, 1), -1) if lengths == [1] else None)
    path = _crafted(tmp_path, cache, craft)
    with pytest.raises(ValueError, match=REFUSED):
        load_cache(path)


@pytest.mark.parametrize("first", [7, 2**33])
def test_a_text_that_begins_elsewhere_goes_on_there(first: int, tmp_path: Path) -> None:
    cache = _filled(KVCache(), ALIKE, range(first, first + 20))
    read = _read_again(cache, tmp_path)
    assert (read.kv_positions, read.positions(1)) == (range(first, first + 20), range(first + 20, first + 21))
    new = [torch.randn(2, heads, 1, 8) for heads in (4, 2, 2)]
    outs = [one.attend(Softmax(), *new, mask=CAUSAL) for one in (read, cache)]
    torch.testing.assert_close(*outs, atol=0, rtol=0)


def test_the_farthest_places_are_read(tmp_path: Path) -> None:
    table = padded_positions([5, 3], side="left")
    table = torch.where(table < 0, -1, table + 2**40 - 4)
    assert int(table.max()) == 2**40
    read = _read_again(_filled(KVCache(), [5, 5], table), tmp_path)
    assert torch.equal(read.kv_positions, table)
    for run, fits in ((range(2**40 - 5, 2**40), True), (range(2**40 - 4, 2**40 + 1), False)):
        cross = CrossCache()
        cross.fill(torch.randn(1, 2, 5, 8), torch.randn(1, 2, 5, 8), kv_positions=run)
        if fits:
            assert _read_again(cross, tmp_path).kv_positions == run
        else:
            save_cache(cross, tmp_path / "cache")
            with pytest.raises(ValueError, match=REFUSED + "has invalid kv_positions for a CrossCache"):
                load_cache(tmp_path / "cache")


@pytest.mark.parametrize("kind", KINDS)
def test_items_without_a_token_and_batches_without_an_item_are_read(kind: str, tmp_path: Path) -> None:
    if kind != "turned":
        read = _read_again(_filled(KINDS[kind](), [5, 0]), tmp_path)
        assert read.positions(1).tolist() == [[5], [0]]
    for lengths in ([6, 6], [6, 4]) if kind != "turned" else ([6, 6],):
        cache = _filled(KINDS[kind](), lengths)
        cache.reorder([])
        assert _read_again(cache, tmp_path).length == 6


@pytest.mark.parametrize("length", [1, 2, 4, 5, 6])
def test_a_memory_of_few_tokens_is_read(length: int, tmp_path: Path) -> None:
    cache = _filled(CompressiveCache(), [length, length])
    read, new = _read_again(cache, tmp_path), [torch.randn(2, heads, 7, 8) for heads in (4, 2, 2)]
    with torch.no_grad():
        torch.testing.assert_close(*(one.attend(MEMORY, *new, mask=CAUSAL) for one in (read, cache)), atol=0, rtol=0)


def test_room_for_one_token_and_all_the_machine_has_are_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert _read_again(_filled(KVCache(1), [1, 1]), tmp_path).max_len == 1
    cache = KVCache(40)
    cache.fill(torch.randn(5, 2, 7, 8), torch.randn(5, 2, 7, 3))
    save_cache(cache, tmp_path / "cache")
    needed = 5 * 2 * (8 + 3) * 4 * 41  # and one column more
    monkeypatch.setattr("saccade.caches.files.file_contents._memory_bytes", lambda: needed)
    assert load_cache(tmp_path / "cache").nbytes == cache.nbytes
    monkeypatch.setattr("saccade.caches.files.file_contents._memory_bytes", lambda: needed - 1)
    with pytest.raises(ValueError, match=f"{REFUSED}needs {needed:,} bytes of memory for a KVCache"):
        load_cache(tmp_path / "cache")


@pytest.mark.parametrize("error", [AttributeError, ValueError, OSError])
def test_a_machine_of_unknown_memory_counts_as_a_terabyte(
    error: type[Exception], monkeypatch: pytest.MonkeyPatch
) -> None:
    def unknown(_: str) -> int:
        raise error("it does not say")

    monkeypatch.setattr(os, "sysconf", unknown)
    assert files.file_contents._memory_bytes() == 2**40


@pytest.mark.parametrize("depth", [16, 17])
def test_caches_in_one_another_are_read_to_a_depth(depth: int, tmp_path: Path) -> None:
    cache: Cache | LayerCache = KVCache()
    for _ in range(depth):
        cache = Cache([cache])
    save_cache(cache, tmp_path / "cache")
    if depth == 16:
        assert [type(one) for one in load_cache(tmp_path / "cache").flat] == [KVCache]
    else:
        with pytest.raises(ValueError, match="got a file that has invalid layers for a Cache"):
            load_cache(tmp_path / "cache")


@pytest.mark.parametrize("wrong", [3, b"abc", ""], ids=repr)
def test_a_wrong_fingerprint_is_refused_before_writing(wrong: object, tmp_path: Path) -> None:
    with pytest.raises(TypeError, match=r"save_cache: fingerprint must be a string or None; got "):
        save_cache(KVCache(), tmp_path / "cache", fingerprint=wrong)
    assert not any(tmp_path.iterdir())


def test_a_cache_is_read_to_a_device(tmp_path: Path) -> None:
    save_cache(_filled(KVCache(), ALIKE), tmp_path / "cache")
    assert load_cache(tmp_path / "cache", device="meta").key.device.type == "meta"
    assert load_cache(tmp_path / "cache").key.device.type == "cpu"


@pytest.mark.parametrize("scorer", [BlockMeans(), BlockBounds()], ids=["mean", "bound"])
def test_the_scorer_and_all_sizes_are_those_that_were_saved(scorer: BlockScorer, tmp_path: Path) -> None:
    cache = BlockSelectCache(3, 18, sink_blocks=2, local_blocks=4, scorer=scorer, rescore_every=5, max_len=40)
    read = _read_again(cache, tmp_path)
    assert repr(read) == repr(cache)
    assert type(read.scorer) is type(scorer)


def test_a_ranking_that_is_not_to_be_used_again_is_used_once_at_most(tmp_path: Path) -> None:
    cache = _filled(BlockSelectCache(2, 8, rescore_every=4), ALIKE)
    steps = [[torch.randn(2, heads, 1, 8) for heads in (4, 2, 2)] for _ in range(4)]
    cache.attend(Softmax(), *steps[0], mask=CAUSAL)
    assert "ranking" in cache._state
    outs = []
    for names in ((), ("ranking",)):

        def craft(tree: dict[str, Any], tensors: dict[str, Tensor], names: tuple[str, ...] = names) -> None:
            tree["settings"].update(rescore_every=1)
            tree.update(age=0)
            tensors["ranking"].copy_(tensors["ranking"].flip(2))
            for name in names:
                tensors.pop(name)

        read = load_cache(_crafted(tmp_path, cache, craft))
        outs.append([read.attend(Softmax(), *step, mask=CAUSAL) for step in steps[1:]])
    for own, expected in zip(*(out[1:] for out in outs), strict=True):
        torch.testing.assert_close(own, expected)
