"""Caches as files: what is read goes on as if it had never been away; anything else is refused, with the reason."""

import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.caches import cache_kinds
from torch import Tensor

from saccade import masks, models
from saccade.caches import (
    BlockSelectCache,
    Cache,
    CrossCache,
    KVCache,
    LatentCache,
    LayerCache,
    RecurrentCache,
    SinkWindowCache,
    fingerprint,
    load_cache,
    padded_positions,
    save_cache,
)
from saccade.mechanisms import Linear, Softmax
from saccade.positions import Rotary, YaRN
from saccade.scorers import BlockBounds, BlockMeans, BlockScorer

CAUSAL = masks.Causal()
KINDS: dict[str, Callable[[], LayerCache]] = cache_kinds.KINDS | {
    "room": lambda: KVCache(40),
    "latents": lambda: LatentCache(6),
    # with whatever else can be chosen, as a file must keep it
    "blocks": lambda: BlockSelectCache(4, 16, scorer=BlockMeans()),
    "ranked seldom": lambda: BlockSelectCache(2, 8, sink_blocks=0, local_blocks=1, rescore_every=4),
    "turned": lambda: SinkWindowCache(
        2, 5, rotary=Rotary(8, base=500.0, rotary_dim=4, layout="interleaved", scaling=YaRN(2.0, trained_len=9))
    ),
}


def _qkv(length: int, dtype: torch.dtype = torch.float32) -> list[Tensor]:
    return [torch.randn(2, heads, length, 8).to(dtype) for heads in (4, 2, 2)]


def _fitting(cache: LayerCache, qkv: list[Tensor]) -> list[Tensor]:
    return [*qkv[:2], qkv[1][..., : cache.latent_dim]] if isinstance(cache, LatentCache) else qkv


def _steps(cache: LayerCache, qkv: list[Tensor], start: int, stop: int) -> Tensor:
    each = [cache.attend(Softmax(), *(x[:, :, i : i + 1] for x in qkv), mask=CAUSAL) for i in range(start, stop)]
    return torch.cat(each, 2)


@pytest.mark.ci
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
@pytest.mark.parametrize("ragged", [False, True])
@pytest.mark.parametrize("kind", KINDS)
def test_a_loaded_cache_continues_unchanged(kind: str, ragged: bool, dtype: torch.dtype, tmp_path: Path) -> None:
    cache, qkv = KINDS[kind](), _qkv(36, dtype)
    qkv = _fitting(cache, qkv)
    positions = padded_positions([20, 13], side="left") if ragged else None
    cache.attend(Softmax(), *(x[:, :, :20] for x in qkv), mask=CAUSAL, positions=positions)
    _steps(cache, qkv, 20, 23)
    save_cache(cache, tmp_path / "cache")
    other = load_cache(tmp_path / "cache")
    assert type(other) is type(cache)
    assert (other.length, repr(other.positions(2))) == (cache.length, repr(cache.positions(2)))
    assert getattr(other, "exact_len", None) == getattr(cache, "exact_len", None)
    assert kind != "room" or other.nbytes == cache.nbytes
    torch.testing.assert_close(_steps(other, qkv, 23, 30), _steps(cache, qkv, 23, 30), atol=0, rtol=0)
    for one in (other, cache):
        one.reorder([1, 1])
    torch.testing.assert_close(_steps(other, qkv, 30, 36), _steps(cache, qkv, 30, 36), atol=0, rtol=0)


@pytest.mark.parametrize("kind", KINDS)
def test_a_file_of_few_tokens_goes_on_too(kind: str, tmp_path: Path) -> None:
    cache = KINDS[kind]()
    qkv = _fitting(cache, _qkv(14))
    for start, stop in ((0, 1), (1, 2), (2, 5), (5, 9)):
        _steps(cache, qkv, start, stop)
        save_cache(cache, tmp_path / "cache")
        read = load_cache(tmp_path / "cache")
        expected = _steps(cache.fork(), qkv, stop, stop + 3)
        torch.testing.assert_close(_steps(read, qkv, stop, stop + 3), expected, atol=0, rtol=0)


def test_empty_caches_and_those_of_whole_models_are_files_too(tmp_path: Path) -> None:
    for make in KINDS.values():
        save_cache(make(), tmp_path / "cache")
        empty = load_cache(tmp_path / "cache")
        assert (empty.length, empty.nbytes) == (0, 0)
        _steps(empty, _fitting(empty, _qkv(2)), 0, 2)
    cross, nested = CrossCache(), KVCache()
    context = _qkv(7)
    where = padded_positions([7, 4])
    first = cross.attend(Softmax(), context[0][:, :, :1], *context[1:])
    cross.fork().attend(Softmax(), context[0])
    save_cache(Cache([Cache([nested, cross]), KVCache()]), tmp_path / "cache")
    read = load_cache(tmp_path / "cache")
    assert [type(one) for one in read.flat] == [KVCache, CrossCache, KVCache]
    torch.testing.assert_close(read.flat[1].attend(Softmax(), context[0][:, :, :1]), first, atol=0, rtol=0)
    assert read.flat[1].traffic == cross.fork().traffic or read.flat[1].traffic.bytes_appended == 0
    placed = CrossCache()
    placed.fill(*context[1:], kv_positions=where)
    save_cache(placed, tmp_path / "cache")
    assert torch.equal(load_cache(tmp_path / "cache").kv_positions, where)
    for run in (range(2, 9), range(14, 0, -2), None):
        in_a_row = CrossCache()
        in_a_row.fill(*context[1:], kv_positions=run)
        save_cache(in_a_row, tmp_path / "cache")
        read = load_cache(tmp_path / "cache")
        assert read.kv_positions == run
        out = read.attend(Softmax(), context[0], mask=CAUSAL, positions=range(7))
        assert read.traffic == (in_a_row.nbytes, 0)
        expected = in_a_row.attend(Softmax(), context[0], mask=CAUSAL, positions=range(7))
        torch.testing.assert_close(out, expected, atol=0, rtol=0)


def test_a_full_cache_and_one_of_nothing_but_latents_are_files_too(tmp_path: Path) -> None:
    (q, k, v), full, latents = _qkv(5), KVCache(5), LatentCache(8, 5)
    full.attend(Softmax(), q, k, v, mask=CAUSAL)
    latents.fill(k, k)
    assert latents.traffic == (0, k.nbytes)
    for cache in (full, latents):
        save_cache(cache, tmp_path / "cache")
        read = load_cache(tmp_path / "cache")
        assert (read.length, read.max_len, read.nbytes) == (5, 5, cache.nbytes)
        torch.testing.assert_close(read.value, cache.value, atol=0, rtol=0)


@pytest.mark.parametrize("sinks", [0, 1])
def test_a_turned_window_of_few_first_keys_is_a_file_too(sinks: int, tmp_path: Path) -> None:
    cache, qkv = SinkWindowCache(sinks, 5, rotary=Rotary(8)), _qkv(12)
    _steps(cache, qkv, 0, 8)
    save_cache(cache, tmp_path / "cache")
    read = load_cache(tmp_path / "cache")
    torch.testing.assert_close(_steps(read, qkv, 8, 12), _steps(cache, qkv, 8, 12), atol=0, rtol=0)


def test_values_of_latents_are_views_of_their_keys() -> None:
    q, k, _ = _qkv(5)
    for value in (k[..., :6].clone(), k[..., 1:7], k[..., :5], k.mT[..., :5, :].mT[..., :5]):
        with pytest.raises(ValueError, match=r"value must be key\[\.\.\., :6\], a view"):
            LatentCache(6).attend(Softmax(), q, k, value)
    kept = LatentCache(6)
    kept.attend(Softmax(), q, k, k[..., :6], mask=CAUSAL)
    assert kept.traffic == (k.nbytes, k.nbytes)


def test_the_file_is_what_others_call_safetensors(tmp_path: Path) -> None:
    from safetensors import safe_open  # noqa: PLC0415

    cache, qkv = KVCache(), _qkv(5, torch.bfloat16)
    cache.attend(Softmax(), *qkv, mask=CAUSAL, positions=padded_positions([5, 3]))
    save_cache(Cache([cache]), tmp_path / "cache")
    with safe_open(tmp_path / "cache", "pt") as file:
        assert sorted(file.keys()) == ["0.key", "0.positions", "0.value"]
        assert torch.equal(file.get_tensor("0.key"), qkv[1])
        assert file.get_tensor("0.positions").tolist() == padded_positions([5, 3]).tolist()


def _saved(path: Path, name: str | None = "abc") -> bytes:
    cache = Cache([KVCache()])
    torch.manual_seed(3)
    cache.flat[0].attend(Softmax(), *(x[..., :3] for x in _qkv(3)), mask=CAUSAL)
    save_cache(cache, path, fingerprint=name)
    return path.read_bytes()


def test_every_truncation_and_every_changed_byte_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "cache"
    whole = _saved(path)
    assert load_cache(path, fingerprint="abc").length == 3
    for length in range(0, len(whole), 7):
        path.write_bytes(whole[:length])
        with pytest.raises(ValueError, match="load_cache: path must be a complete and undamaged file of a cache; got"):
            load_cache(path, fingerprint="abc")
    padding = whole.index(b"}", len(whole) - 2 * 3 * 2 * 2 * 3 * 4 - 9) + 1  # spaces behind the header mean nothing
    for place in range(0, len(whole), 3):
        changed = bytearray(whole)
        changed[place] ^= 0x80 if place % 2 else 1
        if place >= padding and whole[place : place + 1] == b" " and changed[place : place + 1].isspace():
            continue
        path.write_bytes(changed)
        with pytest.raises(ValueError, match=r"load_cache: (path|fingerprint) must be"):
            load_cache(path, fingerprint="abc")
    path.write_bytes(whole + b"\0")
    with pytest.raises(ValueError, match="got a truncated, damaged or foreign file of"):
        load_cache(path, fingerprint="abc")


def test_foreign_files_are_refused_with_the_reason(tmp_path: Path) -> None:
    from safetensors.torch import save_file  # noqa: PLC0415

    path = tmp_path / "cache"
    with pytest.raises(ValueError, match="got no file at"):
        load_cache(path)
    with pytest.raises(ValueError, match="got no file at"):
        load_cache(tmp_path)
    path.write_bytes(b"")
    with pytest.raises(ValueError, match="got a truncated, damaged or foreign file of 0 bytes"):
        load_cache(path)
    save_file({"0.key": torch.ones(1)}, path)
    with pytest.raises(ValueError, match="got a safetensors file that saccade did not write"):
        load_cache(path)
    torch.save({"a": torch.ones(1)}, path)
    with pytest.raises(ValueError, match="got a truncated, damaged or foreign file"):
        load_cache(path)
    whole = _saved(path)
    path.write_bytes(whole.replace(b'\\"version\\": 1', b'\\"version\\": 9'))
    with pytest.raises(
        ValueError, match=r"(?s)got a file of version 9\..*this version of saccade reads files of version 1"
    ):
        load_cache(path, fingerprint="abc")


class Sourced(Linear):
    """Features of one's own, told apart by something that is in this process alone."""

    def features(self, query: Tensor, key: Tensor) -> Any:
        return *super().features(query, key)[:2], object


def test_a_cache_is_for_the_model_that_made_it(tmp_path: Path) -> None:
    path = tmp_path / "cache"
    _saved(path, "abc")
    with pytest.raises(
        ValueError, match="fingerprint must equal the fingerprint in the file; got the fingerprint of another"
    ):
        load_cache(path, fingerprint="other")
    with pytest.raises(ValueError, match="fingerprint must equal the fingerprint in the file; got none"):
        load_cache(path)
    _saved(path, None)
    with pytest.raises(ValueError, match="fingerprint must be None, because the file has no fingerprint"):
        load_cache(path, fingerprint="abc")
    assert load_cache(path).length == 3
    with pytest.raises(TypeError, match="fingerprint must be a string or None; got int"):
        load_cache(path, fingerprint=3)
    with pytest.raises(TypeError, match="cache must be a cache of a layer or a model; got dict"):
        save_cache({}, path)
    with pytest.raises(NotImplementedError, match="it is a custom cache class, and a file contains no code"):
        save_cache(type("Own", (KVCache,), {})(), path)
    sums, x = RecurrentCache(), torch.randn(1, 1, 3, 4)
    sums.attend(Sourced(), x, x, x, mask=CAUSAL)
    with pytest.raises(NotImplementedError, match="its features are identified by a type, which cannot be saved"):
        save_cache(sums, path)

    class Own(BlockScorer):
        summarize = BlockBounds.summarize
        score = BlockBounds.score

    with pytest.raises(NotImplementedError, match="its scorer Own is a custom class, and a file contains no code"):
        save_cache(BlockSelectCache(4, 16, scorer=Own()), path)
    assert load_cache(path).length == 3


def _decoder(**how: object) -> models.Decoder:
    torch.manual_seed(5)
    sizes = {"vocab_size": 40, "max_len": 64, "embed_dim": 16, "num_heads": 4, "num_layers": 2, "feed_forward_dim": 16}
    return models.Decoder(models.DecoderConfig(**(sizes | {"num_kv_heads": 2} | how))).eval()


def test_whatever_changes_keys_changes_the_fingerprint() -> None:
    model = _decoder()
    own = fingerprint(model)
    assert own == fingerprint(_decoder())
    others = [
        _decoder(rotary_base=500.0),
        _decoder(mask=masks.sliding_window(9)),
        _decoder().double(),
        _decoder(num_heads=8),
    ]
    changed = _decoder()
    with torch.no_grad():
        changed.stack.layers[1].feed_forward.contract.weight[3, 2] += 1e-6
    names = {own, fingerprint(changed), *map(fingerprint, others)}
    assert len(names) == 6
    with pytest.raises(TypeError, match="model must be a torch module; got str"):
        fingerprint("name")


READ_ON = """
import json, sys
import torch
from saccade import caches, models
model = models.Decoder.from_pretrained(sys.argv[1])
cache = caches.load_cache(sys.argv[2], fingerprint=caches.fingerprint(model))
print(json.dumps(models.generate(model, [[7]], 12, cache=cache)))
"""


@pytest.mark.ci
@pytest.mark.parametrize(
    "kind", [pytest.param("all", marks=pytest.mark.slow), "blocks", pytest.param("turned", marks=pytest.mark.slow)]
)
def test_a_new_process_goes_on_with_the_same_tokens(kind: str, tmp_path: Path) -> None:
    model = _decoder()
    model.save_pretrained(tmp_path / "model")
    model = models.Decoder.from_pretrained(tmp_path / "model")
    made = {
        "all": KVCache,
        "blocks": lambda: BlockSelectCache(2, 8),
        "turned": lambda: SinkWindowCache(2, 5, rotary=model.stack.layers[0].attention.rotary),
    }[kind]
    cache = Cache(made() for _ in range(2))
    prompt = torch.randint(40, (30,), generator=torch.Generator().manual_seed(1)).tolist()
    models.generate(model, [prompt], 5, cache=cache)
    save_cache(cache, tmp_path / "cache", fingerprint=fingerprint(model))
    expected = models.generate(model, [[7]], 12, cache=cache)
    command = [sys.executable, "-c", READ_ON, str(tmp_path / "model"), str(tmp_path / "cache")]
    run = subprocess.run(
        command, capture_output=True, text=True, check=True, env={**os.environ, "OMP_NUM_THREADS": "1"}
    )
    assert json.loads(run.stdout) == expected


def test_a_write_that_fails_leaves_the_old_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "cache"
    whole = _saved(path)

    def full(*args: object) -> int:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "write", full)
    with pytest.raises(OSError, match="No space left"):
        _saved(path, "new")
    monkeypatch.undo()
    assert path.read_bytes() == whole
    assert [one.name for one in tmp_path.iterdir()] == ["cache"]
