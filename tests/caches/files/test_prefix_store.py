"""Tests of PrefixStore: known prefixes are not computed again, and no wrong entry is ever returned."""

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from saccade import models
from saccade.caches import (
    BlockSelectCache,
    Cache,
    PrefixStore,
    SinkWindowCache,
    fingerprint,
    load_cache,
    padded_positions,
)

VOCAB, SIZE = 40, 8


def _decoder(seed: int = 5) -> models.Decoder:
    torch.manual_seed(seed)
    sizes = {"vocab_size": VOCAB, "max_len": 256, "embed_dim": 16, "num_heads": 4, "num_kv_heads": 2}
    return models.Decoder(models.DecoderConfig(**sizes, num_layers=2, feed_forward_dim=16)).eval()


def _text(length: int, seed: int = 1) -> list[int]:
    return torch.randint(VOCAB, (length,), generator=torch.Generator().manual_seed(seed)).tolist()


MODEL = _decoder()
NAME = fingerprint(MODEL)


def _store(folder: Path, max_bytes: int = 1 << 24, **how: object) -> PrefixStore:
    return PrefixStore(folder, max_bytes, **({"fingerprint": NAME, "block_size": SIZE} | how))


def _read(text: list[int]) -> Cache:
    cache = MODEL.new_cache()
    with torch.no_grad():
        MODEL.hidden(torch.tensor([text]), cache=cache)
    return cache


def _agrees(cache: Cache, text: list[int]) -> bool:
    """Return whether a cache holds the same as one that has read the text."""
    full = _read(text)
    if cache.length == 0:
        return True
    return all(
        torch.allclose(own.key, own_full.key[:, :, : own.length], atol=1e-5)
        and torch.allclose(own.value, own_full.value[:, :, : own.length], atol=1e-5)
        for own, own_full in zip(cache.flat, full.flat, strict=True)
    )


def test_texts_that_begin_alike_share_what_is_alike(tmp_path: Path) -> None:
    store, text = _store(tmp_path), _text(37)
    assert store.put(text, _read(text)) == 4
    other = [*text[:20], *_text(30, 2)]
    assert (store.find(text), store.find(other), store.find(_text(30, 3))) == (32, 16, 0)
    for prompt, known in ((text, 32), (other, 16), (text[:32], 24), (text[:33], 32), (text[:8], 0), (_text(30, 3), 0)):
        cache = MODEL.new_cache()
        assert store.restore(prompt, cache) == known
        assert cache.length == known
        expected = models.generate(MODEL, [prompt], 9)
        assert models.generate(MODEL, [prompt[known:]], 9, cache=cache) == expected
    assert store.put(other, _read(other)) == 4
    assert store.put(other, _read(other)) == 0
    assert _store(tmp_path).find(other) == 48


def test_a_prefix_is_for_one_model_one_salt_and_one_place_in_the_text(tmp_path: Path) -> None:
    store, text = _store(tmp_path), _text(32)
    store.put(text, _read(text))
    assert _store(tmp_path, salt="adapter").find(text) == 0
    assert _store(tmp_path, fingerprint=fingerprint(_decoder(6))).find(text) == 0
    assert _store(tmp_path, block_size=4).find(text) == 0
    assert store.find(text[SIZE:]) == 0  # the same tokens, elsewhere
    assert store.find([text[0] + 1, *text[1:]]) == 0
    assert store.find(text) == 32


def test_continuing_from_a_prefix_does_not_change_the_store(tmp_path: Path) -> None:
    store, text = _store(tmp_path), _text(32)
    store.put(text, _read(text))
    before = {path: path.read_bytes() for path in tmp_path.glob("??/*")}
    cache = MODEL.new_cache()
    store.restore(text, cache)
    models.generate(MODEL, [text[24:]], 9, cache=cache)
    for layer in cache.flat:
        layer.key.fill_(3.0)
    assert before == {path: path.read_bytes() for path in tmp_path.glob("??/*")}


def test_damaged_blocks_are_missing_ones(tmp_path: Path) -> None:
    store, text = _store(tmp_path), _text(33)
    cache = _read(text)
    for damage in (lambda raw: raw[:-1], lambda raw: raw[:-5] + b"abcde", lambda raw: b"", lambda raw: raw + b"x"):
        store.put(text, cache)
        path = store._blocks.path(store._chain(text)[1])
        path.write_bytes(damage(path.read_bytes()))
        own = MODEL.new_cache()
        assert store.restore(text, own) == SIZE
        assert not path.exists()
    store.put(text, cache)
    chain = store._chain(text)
    store._blocks.path(chain[2]).write_bytes(
        store._blocks.path(chain[1]).read_bytes()
    )  # a whole block in the place of another
    own = MODEL.new_cache()
    assert store.restore(text, own) == 2 * SIZE
    assert _agrees(own, text)


def test_the_folder_never_exceeds_its_bytes_and_the_least_used_goes_first(tmp_path: Path) -> None:
    texts = [_text(24, seed) for seed in range(3)]
    one = _store(tmp_path)
    one.put(texts[0], _read(texts[0]))
    block = one.nbytes // 3
    one.clear()
    assert one.nbytes == 0
    store = _store(tmp_path, max_bytes=6 * block + block // 2)
    store.put(texts[0], _read(texts[0]))
    store.put(texts[1], _read(texts[1]))
    store.restore(texts[0], MODEL.new_cache())  # used: all but the last block, which a prompt of 24 does not take
    assert store.put(texts[2][:SIZE], _read(texts[2])) == 1
    assert store.nbytes <= store.max_bytes
    assert (store.find(texts[0]), store.find(texts[1]), store.find(texts[2])) == (16, 24, 8)
    assert store.put(texts[2][: 2 * SIZE], _read(texts[2])) == 1
    assert (store.find(texts[0]), store.find(texts[1])) == (16, 16)  # the end of a text before its beginning
    small = _store(tmp_path / "small", max_bytes=block + block // 2)
    assert small.put(texts[0], _read(texts[0])) == 1  # what it needs itself is not removed for it
    assert small.find(texts[0]) == SIZE
    assert _store(tmp_path / "none", max_bytes=10).put(texts[0], _read(texts[0])) == 0


def test_only_exact_keys_are_kept(tmp_path: Path) -> None:
    store, text = _store(tmp_path), _text(60)
    cache = Cache(BlockSelectCache(4, 16) for _ in range(2))
    with torch.no_grad():
        MODEL(torch.tensor([text[:30]]), cache=cache)
        for token in text[30:]:
            MODEL(torch.tensor([[token]]), cache=cache)
    assert store.put(text, cache) == 3
    again = Cache(BlockSelectCache(4, 16) for _ in range(2))
    assert store.restore(text, again) == 24
    assert _agrees(again, text)
    prompt = text[:30]
    fresh, known = (Cache(BlockSelectCache(4, 16) for _ in range(2)) for _ in range(2))
    start = store.restore(prompt, known)
    assert models.generate(MODEL, [prompt[start:]], 9, cache=known) == models.generate(MODEL, [prompt], 9, cache=fresh)


def test_caches_that_cannot_be_stored_are_refused(tmp_path: Path) -> None:
    store, text = _store(tmp_path), _text(16)
    with pytest.raises(ValueError, match="tokens must be in the cache, so at most 0 tokens; got 16"):
        store.put(text, MODEL.new_cache())
    with pytest.raises(ValueError, match="cache must be empty; got 16 columns"):
        store.restore(text, _read(text))
    with pytest.raises(NotImplementedError, match="a SinkWindowCache does not store the keys of all tokens"):
        store.restore(text, Cache([SinkWindowCache(1, 4)]))
    with pytest.raises(TypeError, match="tokens must be the tokens of one text, a list of ints; got list"):
        store.find([text])
    with pytest.raises(TypeError, match="cache must be a cache; got NoneType"):
        store.put(text, None)
    two = _read(text)
    two.reorder([0, 0])
    with pytest.raises(ValueError, match="cache must contain a batch of one; got 2"):
        store.put(text, two)
    ragged = MODEL.new_cache()
    MODEL(torch.tensor([text, text]), cache=ragged, positions=padded_positions([16, 3]))
    with pytest.raises(ValueError, match="cache must contain tokens at positions 0, 1, 2"):
        store.put(text, ragged)
    with pytest.raises(ValueError, match="fingerprint must name a model"):
        PrefixStore(tmp_path, 100, fingerprint="")
    with pytest.raises(TypeError, match="salt must be a string; got int"):
        _store(tmp_path, salt=3)
    with pytest.raises(ValueError, match="max_bytes must be an int of at least 1; got 0"):
        _store(tmp_path, max_bytes=0)
    assert store.nbytes == 0


CHILD = """
import os, signal, sys
from pathlib import Path
import torch
sys.path.insert(0, sys.argv[1])
count, limit = 0, int(sys.argv[3])
halfway = sys.argv[4] == "half"
names = ("open", "write", "fsync", "replace", "close", "utime", "unlink")
real = {name: getattr(os, name) for name in names}

def counted(name):
    def call(*args, **how):
        global count
        count += 1
        if count == limit:
            if halfway and name == "write":
                real["write"](args[0], args[1][: max(1, len(args[1]) // 2)])
            elif halfway:
                real[name](*args, **how)
            os.kill(os.getpid(), signal.SIGKILL)
        return real[name](*args, **how)
    return call

import tests_prefix_store as own
store, folder = own._store(Path(sys.argv[2]), max_bytes=int(sys.argv[5])), Path(sys.argv[2])
text = own._text(24, 9)
cache = own._read(text)
for name in names:
    setattr(os, name, counted(name))
if sys.argv[6] == "store":
    store.put(text, cache)
else:
    __import__("saccade.caches").caches.save_cache(cache, folder / "cache")
for name in names:
    setattr(os, name, real[name])
print("done", count)
"""


def _killed(tmp_path: Path, what: str, limit: int, where: str, max_bytes: int) -> bool:
    """Run a write that is killed at one of its steps; return False if it finished because it had fewer steps."""
    module = tmp_path / "module"
    module.mkdir(exist_ok=True)
    (module / "tests_prefix_store.py").write_bytes(Path(__file__).read_bytes())
    command = [
        sys.executable,
        "-c",
        CHILD,
        str(module),
        str(tmp_path / "kept"),
        str(limit),
        where,
        str(max_bytes),
        what,
    ]
    run = subprocess.run(
        command, capture_output=True, text=True, check=False, env={**os.environ, "OMP_NUM_THREADS": "1"}
    )
    assert run.returncode in (0, -signal.SIGKILL), run.stderr
    return run.returncode != 0


@pytest.mark.slow
@pytest.mark.parametrize("where", ["before", "half"])
def test_killed_at_any_step_of_a_write_the_store_serves_nothing_wrong(where: str, tmp_path: Path) -> None:
    texts = {seed: _text(24, seed) for seed in (8, 9)}
    store = _store(tmp_path / "kept")
    store.put(texts[8], _read(texts[8]))
    full = store.nbytes + store.nbytes // 2  # the second text makes room by removing some of the first
    limit, served = 0, set()
    while True:
        limit += 1
        store.clear()
        store.put(texts[8], _read(texts[8]))
        killed = _killed(tmp_path, "store", limit, where, full)
        for text in texts.values():
            cache = MODEL.new_cache()
            known = store.restore([*text, 1], cache)
            served.add(known)
            assert _agrees(cache, [*text, 1])
        assert store.put(texts[9], _read(texts[9])) >= 0  # the lock of the dead is open
        assert store.find(texts[9]) == 24
        if not killed:
            break
    assert limit > 10
    assert served >= {8, 16, 24}


@pytest.mark.slow
@pytest.mark.parametrize("where", ["before", "half"])
def test_killed_at_any_step_of_a_save_a_file_is_the_old_one_or_the_new(where: str, tmp_path: Path) -> None:
    from saccade.caches import save_cache  # noqa: PLC0415

    folder = tmp_path / "kept"
    folder.mkdir()
    limit, seen = 0, set()
    while True:
        limit += 1
        for old in (False, True):
            (folder / "cache").unlink(missing_ok=True)
            if old:
                save_cache(_read(_text(11, 8)), folder / "cache")
            killed = _killed(tmp_path, "save", limit, where, 1 << 24)
            if (folder / "cache").exists():
                cache = load_cache(folder / "cache")
                seen.add(cache.length)
                assert _agrees(cache, _text(11, 8) if cache.length == 11 else _text(24, 9))
            else:
                assert not old
        if not killed:
            break
    assert limit > 5
    assert seen == {11, 24}


WORKER = """
import sys
from pathlib import Path
sys.path.insert(0, sys.argv[1])
import tests_prefix_store as own
store = own._store(Path(sys.argv[2]), max_bytes=int(sys.argv[3]))
for i in range(30):
    seed = (int(sys.argv[4]) + 7 * i) % 5
    text = own._text(33, seed)
    cache = own.MODEL.new_cache()
    store.restore(text, cache)
    assert own._agrees(cache, text), "something wrong was served"
    store.put(text, own._read(text))
    assert store.nbytes <= store.max_bytes, "too many bytes"
print("fine")
"""


@pytest.mark.slow
def test_two_processes_may_use_a_folder(tmp_path: Path) -> None:
    module = tmp_path / "module"
    module.mkdir()
    (module / "tests_prefix_store.py").write_bytes(Path(__file__).read_bytes())
    block = _store(tmp_path / "kept")
    block.put(_text(8), _read(_text(8)))
    most = 9 * block.nbytes
    workers = [
        subprocess.Popen(
            [sys.executable, "-c", WORKER, str(module), str(tmp_path / "kept"), str(most), str(seed)],
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            env={**os.environ, "OMP_NUM_THREADS": "1"},
        )
        for seed in range(2)
    ]
    for worker in workers:
        out, errors = worker.communicate(timeout=120)
        assert out.strip() == "fine", errors
