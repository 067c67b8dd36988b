"""Cache files with a valid checksum that no cache wrote: each is read as a working cache, or refused in a sentence."""

import copy
import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.sampled import sampled
from torch import Tensor

from saccade import masks, positions
from saccade.caches import (
    BlockSelectCache,
    Cache,
    CompressiveCache,
    CrossCache,
    HeavyHitterCache,
    Int8Cache,
    KVCache,
    LatentCache,
    LayerCache,
    QuantizedCache,
    RecurrentCache,
    SegmentCache,
    SinkWindowCache,
    SnapKVCache,
    buffers,
    files,
    load_cache,
    padded_positions,
    save_cache,
)
from saccade.mechanisms import CompressiveMemory, Linear, Mechanism, Softmax

KINDS: dict[str, Callable[[], LayerCache]] = {
    "all": KVCache,
    "room": lambda: KVCache(40),
    "latents": lambda: LatentCache(6, 40),
    "blocks": lambda: BlockSelectCache(2, 8, sink_blocks=0, local_blocks=1, rescore_every=4),
    "heavy": lambda: HeavyHitterCache(8),
    "snap": lambda: SnapKVCache(8, window=3),
    "8 bits": lambda: Int8Cache(4),
    "2 bits": lambda: QuantizedCache(2, 4),
    "window": lambda: SinkWindowCache(2, 5),
    "segments": lambda: SegmentCache(4, 3),
    "turned": lambda: SinkWindowCache(2, 5, rotary=positions.Rotary(8, scaling=positions.YaRN(2.0, trained_len=9))),
    "sums": RecurrentCache,
    "memory": CompressiveCache,
    "context": CrossCache,
}
MECHANISMS: dict[type, Mechanism] = {RecurrentCache: Linear(), CompressiveCache: CompressiveMemory(4, 5)}
"""The mechanism for each kind of cache that is not made for `Softmax`."""
Written = tuple[dict[str, Any], dict[str, Tensor]]


def _qkv(q_len: int) -> list[Tensor]:
    return [torch.randn(2, heads, q_len, 8) for heads in (4, 2, 2)]


def _filled(kind: str, *, ragged: bool = False) -> LayerCache:
    cache = KINDS[kind]()
    if isinstance(cache, CrossCache):
        cache.fill(*_qkv(5)[1:], kv_positions=padded_positions([5, 3]) if ragged else range(2, 7))
        return cache
    where = padded_positions([20, 13], side="left") if ragged else None
    mechanism = MECHANISMS.get(type(cache), Softmax())
    with torch.no_grad():
        cache.attend(mechanism, *_fitting(cache, *_qkv(20)), mask=masks.Causal(), positions=where)
        for _ in range(3):
            cache.attend(mechanism, *_fitting(cache, *_qkv(1)), mask=masks.Causal())
    return cache


def _fitting(cache: LayerCache, query: Tensor, key: Tensor, value: Tensor) -> list[Tensor]:
    return [query, key, key[..., : cache.latent_dim] if isinstance(cache, LatentCache) else value]


def _written(cache: Cache | LayerCache, folder: Path) -> Written:
    save_cache(cache, folder / "cache")
    tensors, about = files.read_tensors(folder / "cache", "cache")
    return about["cache"], tensors


def _craft(folder: Path, tree: object, tensors: dict[str, Tensor]) -> Path:
    about = {"kind": "cache", "fingerprint": None, "cache": tree}
    files.write_whole(folder / "cache", files.encoded(tensors, about))
    return folder / "cache"


def _is_linear(cache: RecurrentCache, key_width: int, width: int) -> bool:
    """Return whether a cache holds a state that `Linear` could have written."""
    return cache._source is None and cache._memory.state.shape[2:] == (key_width, width + 1)


def _goes_on(cache: Cache | LayerCache) -> None:
    """Use a cache after reading it; an error here means that reading missed a fault."""
    for one in cache.flat if isinstance(cache, Cache) else (cache,):
        assert one.nbytes >= 0
        if one._spec is None:
            continue
        batch, heads, key_width, width, dtype, _ = one._spec
        like = {"dtype": dtype}
        q = torch.randn(batch, 2 * heads, 1, key_width, **like)
        if isinstance(one, CrossCache):
            where = None if one.kv_positions is None else range(1)
            assert one.attend(Softmax(), q, positions=where).shape == (*q.shape[:3], width)
            continue
        k, v = torch.randn(batch, heads, 1, key_width, **like), torch.randn(batch, heads, 1, width, **like)
        for _ in range(3):
            if one.length == getattr(one, "max_len", None):
                continue
            given = MECHANISMS.get(type(one), Softmax()), *_fitting(one, q, k, v)
            # Only the mechanism can tell of which features these are the sums.
            if isinstance(one, RecurrentCache) and not _is_linear(one, key_width, width):
                with pytest.raises(ValueError, match="features must be those of the memory"):
                    one.attend(*given, mask=masks.Causal())
                break
            assert one.attend(*given, mask=masks.Causal()).shape == (*q.shape[:3], width)
        one.fork().reorder([0] * min(batch, 1))


CRAFTED: dict[str, tuple[str, Callable[[dict[str, Any], dict[str, Tensor]], object]]] = {
    "no kind": ("all", lambda tree, tensors: tree.pop("kind")),
    "another kind": ("all", lambda tree, tensors: tree.update(kind="os.system")),
    "no size": ("all", lambda tree, tensors: tree.pop("max_len")),
    "room for all memory": ("room", lambda tree, tensors: tree.update(max_len=10**13)),
    "room for more than there is": ("room", lambda tree, tensors: tree.update(max_len=2**31)),
    "room of words": ("room", lambda tree, tensors: tree.update(max_len="many")),
    "room for too few": ("room", lambda tree, tensors: tree.update(max_len=3)),
    "no keys": ("all", lambda tree, tensors: tensors.pop("key")),
    "keys of ints": ("all", lambda tree, tensors: tensors.update(key=tensors["key"].long())),
    "longer values": ("all", lambda tree, tensors: tensors.update(value=tensors["value"].repeat(1, 1, 2, 1))),
    "flat keys": ("all", lambda tree, tensors: tensors.update(key=tensors["key"][0])),
    "many columns of nobody": (
        "all", lambda tree, tensors: tensors.update({name: torch.zeros(0, 2, 2**40, 8) for name in tensors})
    ),
    "a huge block": ("blocks", lambda tree, tensors: tree["settings"].update(block_size=2**31, budget=2**31)),
    "a scorer of one's own": ("blocks", lambda tree, tensors: tree.update(scorer="__class__")),
    "a ranking of others": ("blocks", lambda tree, tensors: tensors.update(ranking=tensors["ranking"][:1])),
    "a ranking of the future": (
        "blocks", lambda tree, tensors: tensors.update(ranking=tensors["ranking"].repeat(1, 1, 9))
    ),
    "exact beyond its end": ("blocks", lambda tree, tensors: tree.update(exact_until=99)),
    "any class of positions": (
        "turned", lambda tree, tensors: tree["rotary"].update(
            scaling=["Learned", {"max_len": 10**6, "embed_dim": 1024}]
        )
    ),
    "a scaling of others": ("turned", lambda tree, tensors: tree["rotary"].update(scaling=["NTK", {"other": 2.0}])),
    "a scaling beyond numbers": (
        "turned", lambda tree, tensors: tree["rotary"]["scaling"][1].update(attention_factor=10**30)
    ),
    "a turn of another width": ("turned", lambda tree, tensors: tree["rotary"].update(head_dim=16)),
    "a window of another size": ("window", lambda tree, tensors: tree.update(window=6)),
    "a window without end": ("window", lambda tree, tensors: tree.update(window=10**13)),
    "a token in another's slot": ("window", lambda tree, tensors: tensors["table"].add_(1)),
    "the first token in another's slot": (
        "window", lambda tree, tensors: (tree.update(is_run=False), tensors["table"][:, 3:4].zero_())
    ),
    "a token of long ago": ("window", lambda tree, tensors: tensors["table"][:, 3:4].sub_(5)),
    "a token of next week": ("window", lambda tree, tensors: tree.update(next=40)),
    "an end for each, where all are alike": (
        "window", lambda tree, tensors: tensors.update(next=torch.tensor([23, 23]))
    ),
    "one token twice": ("heavy", lambda tree, tensors: tensors["table"][..., 1].copy_(tensors["table"][..., 0])),
    "nobody behind the first token": (
        "heavy", lambda tree, tensors: (tensors["table"][..., 0].zero_(), tensors["table"][..., 1].fill_(-1))
    ),
    "two tokens exchanged": (
        "heavy", lambda tree, tensors: tensors.update(table=tensors["table"][..., [0, 1, 2, 3, 4, 5, 7, 6]])
    ),
    "the first two tokens exchanged": (
        "heavy", lambda tree, tensors: tensors.update(table=tensors["table"][..., [1, 0, 2, 3, 4, 5, 6, 7]])
    ),
    "fewer first keys": ("turned", lambda tree, tensors: tensors.update(sinks=tensors["sinks"][:, :, :1])),
    "no first keys": ("turned", lambda tree, tensors: tensors.pop("sinks")),
    "a token of tomorrow": ("window", lambda tree, tensors: tree.update(next=3)),
    "an unknown end": ("window", lambda tree, tensors: tree.update(next=None)),
    "no end": ("heavy", lambda tree, tensors: tree.pop("next")),
    "tokens out of order": ("heavy", lambda tree, tensors: tensors.update(table=tensors["table"].flip(2))),
    "more than the budget": ("heavy", lambda tree, tensors: tree["settings"].update(budget=5)),
    "nothing received": ("snap", lambda tree, tensors: tensors.pop("received")),
    "other codes": ("8 bits", lambda tree, tensors: tensors.update({"key.codes": tensors["key.codes"].float()})),
    "other blocks": ("8 bits", lambda tree, tensors: tree.update(block_size=5)),
    "a source of code": ("sums", lambda tree, tensors: tree.update(source={"kind": "os.system"})),
    "sums of other values": ("sums", lambda tree, tensors: tree.update(value_dim=5)),
    "fewer codes": (
        "8 bits", lambda tree, tensors: tensors.update(
            {name: x[:, :, :16] for name, x in tensors.items() if "codes" in name}
        )
    ),
    "fewer steps": (
        "8 bits", lambda tree, tensors: tensors.update(
            {name: x[:, :, :4] for name, x in tensors.items() if "steps" in name}
        )
    ),
    "less of the unfinished block": (
        "8 bits", lambda tree, tensors: tensors.update(
            {name: x[:, :, :1] for name, x in tensors.items() if "rest" in name}
        )
    ),
    "sums of another width": ("memory", lambda tree, tensors: tensors.update(memory=tensors["memory"][..., 1:])),
    "two tokens in one place": ("memory", lambda tree, tensors: tensors["table"].fill_(0)),
    "more tokens than came": ("memory", lambda tree, tensors: tree.update(length=2)),
    "two numbers for a range": ("context", lambda tree, tensors: tree.update(kv_positions=[0, 5])),
    "a range of words": ("context", lambda tree, tensors: tree.update(kv_positions=["0", "5", "1"])),
    "a range beyond all positions": (
        "context", lambda tree, tensors: tree.update(kv_positions=[2**41, 2**41 + 5, 1])
    ),
    "a step of no time": ("context", lambda tree, tensors: tree.update(kv_positions=[0, 5, 0])),
    "another time": ("context", lambda tree, tensors: tree.update(kv_positions=[0, 6, 1])),
}  # fmt: skip


@pytest.mark.parametrize("name", CRAFTED)
def test_forged_files_are_refused_before_allocation(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    kind, craft = CRAFTED[name]
    tree, tensors = _written(_filled(kind), tmp_path)
    craft(tree, tensors)
    path = _craft(tmp_path, tree, tensors)

    def no_room(*arguments: object) -> Tensor:
        raise AssertionError("memory was taken")

    monkeypatch.setattr("saccade.caches.kv_cache.empty", no_room)
    monkeypatch.setattr(buffers, "empty", no_room)
    with pytest.raises(ValueError, match=r"^load_cache: path must be a cache file written by save_cache; got ") as e:
        load_cache(path)
    assert "\n" not in str(e.value)


@pytest.mark.parametrize(
    "tree", [None, [], "KVCache", {}, {"kind": "Cache"}, {"kind": "Cache", "layers": []}, {"kind": ["KVCache"]}]
)
def test_no_description_is_none(tree: object, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"^load_cache: path must be a cache file written by save_cache; got "):
        load_cache(_craft(tmp_path, tree, {}))


def test_caches_in_one_another_without_end_are_refused(tmp_path: Path) -> None:
    tree: dict[str, Any] = {"kind": "KVCache", "max_len": None, "first": None}
    for _ in range(3):
        tree = {"kind": "Cache", "layers": [tree]}
    assert load_cache(_craft(tmp_path, tree, {})).length == 0
    for _ in range(90):
        tree = {"kind": "Cache", "layers": [tree]}
    with pytest.raises(ValueError, match="got a file that has invalid layers for a Cache"):
        load_cache(_craft(tmp_path, tree, {}))
    path = _craft(tmp_path, None, {})
    raw = path.read_bytes().replace(b'\\"cache\\": null', b'\\"cache\\": ' + b"[" * 50_000 + b"]" * 50_000)
    size = int.from_bytes(raw[:8], "little") + 100_000 - 4
    path.write_bytes(size.to_bytes(8, "little") + raw[8:])
    with pytest.raises(ValueError, match="load_cache: path must be a complete and undamaged file of a cache"):
        load_cache(path)


VALUES = (None, True, -1, 0, 1, 2, 5, 16, 2**31, 10**13, 10**30, 0.5, "", "KVCache", [], [0, 5, 1], {}, ["NTK", {}])


def _changed(tree: Any, tensors: dict[str, Tensor], rng: random.Random) -> None:
    """Return a copy with one change: a value, or a tensor's type, shape, contents or name."""
    if rng.random() < 0.5:
        inner = rng.choice([tree, *(part for part in tree.values() if isinstance(part, dict))])
        key = rng.choice([*inner, "other"])
        inner[key] = inner.get(key, 0) + 1 if type(inner.get(key)) is int and rng.random() < 0.4 else rng.choice(VALUES)
        return
    name = rng.choice(sorted(tensors))
    x = tensors.pop(name)
    what, axis = rng.randrange(6), rng.randrange(max(1, x.dim()))
    if what == 0 or not x.dim():
        return
    other = {
        1: lambda: x.to(rng.choice([torch.float64, torch.float16, torch.int64, torch.int8, torch.bool])),
        2: lambda: x.narrow(axis, 0, rng.randint(0, x.shape[axis])),
        3: lambda: torch.cat([x, x], axis),
        4: lambda: x[None] if rng.random() < 0.5 else x.flatten(),
        5: lambda: x + rng.choice([-3, 1, 100, 2**20]) if x.dtype == torch.int64 else torch.full_like(x, 0),
    }[what]()
    tensors[name if rng.random() < 0.9 else f"{name}x"] = other


@pytest.mark.ci
@pytest.mark.parametrize(
    "kind, ragged",
    sampled(
        [
            pytest.param(kind, ragged)
            for kind in KINDS
            for ragged in (False, True)
            if (kind, ragged) != ("turned", True)
        ],
        3,
    ),
)
def test_whatever_is_changed_is_a_cache_or_a_sentence(kind: str, ragged: bool, tmp_path: Path) -> None:
    tree, tensors = _written(_filled(kind, ragged=ragged), tmp_path)
    refused = 0
    for seed in range(60):
        rng, own, held = random.Random(seed), copy.deepcopy(tree), dict(tensors)
        for _ in range(rng.choice([1, 1, 2])):
            _changed(own, held, rng)
        path = _craft(tmp_path, own, held)
        try:
            cache = load_cache(path)
        except ValueError as error:
            refused += str(error).startswith("load_cache: path must be a cache file written by save_cache; got ")
            continue
        refused += 1
        _goes_on(cache)
    assert refused == 60


def test_a_file_from_before_a_row_of_positions_was_a_table_is_read(tmp_path: Path) -> None:
    cache = _filled("context", ragged=True)
    tree, tensors = _written(cache, tmp_path)
    tensors["kv_positions"] = torch.arange(3, 8)
    assert load_cache(_craft(tmp_path, tree, tensors)).kv_positions.tolist() == [[3, 4, 5, 6, 7]]


def test_a_file_of_nothing_rounded_from_before_is_read(tmp_path: Path) -> None:
    tree, tensors = _written(KINDS["8 bits"](), tmp_path)
    assert load_cache(_craft(tmp_path, tree | {"first": 0}, tensors)).length == 0
