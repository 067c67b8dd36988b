"""The bytes of files: what the checksum covers, how they come to stand where they are, and which ones count."""

import os
import secrets
from pathlib import Path

import pytest
import torch

from saccade.caches import Cache, CrossCache, KVCache, PrefixStore, files, load_cache, save_cache
from saccade.caches.files.block_store import BlockFolder

RULE = "decoded: path must be a complete and undamaged file of a text; got "


def _raw() -> bytes:
    tensors = {"x": torch.arange(6, dtype=torch.float32).view(2, 3), "y": torch.ones(3, dtype=torch.float16)}
    return bytes(files.encoded(tensors, {"kind": "text", "words": "abc"}))


@pytest.mark.parametrize(
    "old, new",
    [
        (b'"shape":[2,3]', b'"shape":[3,2]'),
        (b'"dtype":"F32"', b'"dtype":"I32"'),
        (b"F16", b"I16"),
        (b'\\"words\\": \\"abc\\"', b'\\"words\\": \\"abd\\"'),
        (b'"x":', b'"z":'),
    ],
    ids=["shape", "dtype", "narrow dtype", "words", "name"],
)
def test_the_checksum_covers_all_that_is_said(old: bytes, new: bytes) -> None:
    raw = _raw()
    tensors, about = files.decoded(raw, "text")
    assert (sorted(tensors), about["words"]) == (["x", "y"], "abc")
    assert raw.count(old) == 1
    with pytest.raises(ValueError, match=f"{RULE}a damaged file: its checksum does not match"):
        files.decoded(raw.replace(old, new), "text")


def test_a_wrong_header_is_foreign_and_a_wrong_checksum_is_damage(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    from safetensors.torch import save  # noqa: PLC0415

    for words in ("[]", "3", "null", '"text"', "{"):
        with pytest.raises(ValueError, match=f"{RULE}a safetensors file that saccade did not write"):
            files.decoded(save({"x": torch.ones(2)}, metadata={"saccade": words}), "text")
    raw = _raw()

    def too_deep(*_: object) -> str:
        raise RecursionError

    monkeypatch.setattr("saccade.caches.files.tensor_files._checksum", too_deep)
    with pytest.raises(ValueError, match=f"{RULE}a damaged file"):
        files.decoded(raw, "text")


def test_tensors_in_any_order_of_memory_are_written(tmp_path: Path) -> None:
    key, value = (torch.randn(2, 5, 3, 4).transpose(1, 2) for _ in range(2))
    cache = CrossCache()
    cache.fill(key, value)
    save_cache(cache, tmp_path / "cache")
    read = load_cache(tmp_path / "cache")
    assert torch.equal(read.key, key)
    assert torch.equal(read.value, value)


def test_a_file_is_written_in_pieces_of_any_size(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    real, sizes = os.write, []

    def slow(handle: int, data: memoryview) -> int:
        sizes.append(len(data))
        if len(sizes) > 100:
            raise OSError("without end")
        return real(handle, data[: 1 + len(sizes) % 3])

    monkeypatch.setattr(os, "write", slow)
    monkeypatch.setattr("saccade.caches.files.tensor_files._PIECE", 7)
    files.write_whole(tmp_path / "file", memoryview(bytes(range(50))))
    monkeypatch.undo()
    assert (tmp_path / "file").read_bytes() == bytes(range(50))
    assert max(sizes) == 7


@pytest.mark.skipif(os.name != "posix", reason="others have no such modes")
def test_a_file_may_be_read_as_the_process_says_and_is_no_program(tmp_path: Path) -> None:
    before = os.umask(0o020)
    try:
        files.write_whole(tmp_path / "file", memoryview(b"text"))
    finally:
        os.umask(before)
    assert (tmp_path / "file").stat().st_mode & 0o777 == 0o646


def test_nothing_that_stands_beside_is_written_to(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(secrets, "token_hex", lambda _: "0" * 16)
    (tmp_path / "mine").write_bytes(b"mine")
    beside = tmp_path / f".file.{'0' * 16}.part"
    beside.symlink_to(tmp_path / "mine")
    with pytest.raises(FileExistsError, match="exists"):
        files.write_whole(tmp_path / "file", memoryview(b"text"))
    assert (tmp_path / "mine").read_bytes() == b"mine"
    assert beside.is_symlink()
    assert not (tmp_path / "file").exists()


KEYS = ["ab" * 32, "0f" * 32, "c0" * 32]


def test_blocks_may_fill_a_folder_to_its_last_byte(tmp_path: Path) -> None:
    folder = BlockFolder(tmp_path, 30)
    assert [folder.write(key, memoryview(b"0123456789"), {key}) for key in KEYS] == [True] * 3
    assert (folder.nbytes, [folder.has(key) for key in KEYS]) == (30, [True] * 3)
    for age, key in enumerate(KEYS):
        os.utime(folder.path(key), (1000 - age, 1000 - age))
    assert folder.write("dd" * 32, memoryview(b"0"), set())
    assert (folder.nbytes, [folder.has(key) for key in KEYS]) == (21, [True, True, False])  # the oldest alone


def test_links_do_not_count(tmp_path: Path) -> None:
    folder, mine = BlockFolder(tmp_path / "folder", 30), tmp_path / "mine"
    folder.write(KEYS[0], memoryview(b"0123456789"), set())
    mine.write_bytes(b"mine")
    folder.path(KEYS[1]).parent.mkdir()
    folder.path(KEYS[1]).symlink_to(mine)
    assert folder.nbytes == 10
    folder.clear()
    assert (folder.nbytes, mine.exists(), folder.path(KEYS[1]).is_symlink()) == (0, True, True)


def test_a_block_that_another_process_removed_makes_room_too(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = BlockFolder(tmp_path, 25)
    for key in KEYS[:2]:
        folder.write(key, memoryview(b"0123456789"), set())
    listed = folder._files()
    for key in KEYS[:2]:
        folder.path(key).unlink()
    monkeypatch.setattr(BlockFolder, "_files", lambda _: listed)
    assert folder.write(KEYS[2], memoryview(b"0123456789"), set())
    folder.clear()


SIZE = 4
TEXT = list(range(3 * SIZE + 1))


def _cache(layers: int = 1, length: int = len(TEXT)) -> Cache:
    cache = Cache(KVCache() for _ in range(layers))
    for layer in cache.flat:
        layer.fill(*(torch.randn(1, 2, length, 3) for _ in range(2)))
    return cache


@pytest.mark.parametrize("layers", [1, 2, 3, 4])
def test_every_layer_is_read_where_it_belongs_and_looked_at(layers: int, tmp_path: Path) -> None:
    store, cache = PrefixStore(tmp_path, 1 << 20, fingerprint="a model", block_size=SIZE), _cache(layers)
    assert store.put(TEXT, cache) == 3
    read = Cache(KVCache() for _ in range(layers))
    assert store.restore(TEXT, read) == 3 * SIZE
    for own, expected in zip(read.flat, cache.flat, strict=True):
        assert torch.equal(own.key, expected.key[:, :, : 3 * SIZE])
        assert torch.equal(own.value, expected.value[:, :, : 3 * SIZE])
    path = store._blocks.path(store._chain(TEXT)[0])
    tensors, about = files.read_tensors(path, "block of a prefix")
    about = {name: x for name, x in about.items() if name not in ("version", "checksum")}
    for name in tensors:
        files.write_whole(path, files.encoded(tensors | {name: tensors[name][:, :, :2]}, about))
        assert store.restore(TEXT, Cache(KVCache() for _ in range(layers))) == 0


def test_a_store_is_read_to_a_device(tmp_path: Path) -> None:
    store, cache = PrefixStore(tmp_path, 1 << 20, fingerprint="a model", block_size=SIZE), KVCache()
    store.put(TEXT, _cache())
    assert store.restore(TEXT, cache, device="meta") == 3 * SIZE
    assert cache.key.device.type == cache.value.device.type == "meta"


@pytest.mark.parametrize("length", range(SIZE, 2 * SIZE + 1))
def test_a_part_of_a_block_is_none(length: int, tmp_path: Path) -> None:
    """The cache holds more tokens than the text that it is put for."""
    store = PrefixStore(tmp_path, 1 << 20, fingerprint="a model", block_size=SIZE)
    assert store.put(TEXT[:length], _cache()) == length // SIZE
    assert store.find(TEXT[:length]) == store.find(TEXT) == length // SIZE * SIZE


def test_blocks_that_are_put_again_count_as_used(tmp_path: Path) -> None:
    store, cache = PrefixStore(tmp_path, 1 << 20, fingerprint="a model", block_size=SIZE), _cache()
    store.put(TEXT, cache)
    paths = [store._blocks.path(key) for key in store._chain(TEXT)]
    for path in paths:
        os.utime(path, (0, 0))
    assert store.put(TEXT, cache) == 0
    used = [path.stat().st_mtime_ns for path in paths]
    assert used == sorted(set(used), reverse=True)
    assert min(used) > 0


@pytest.mark.parametrize("exact", [0, SIZE, 2 * SIZE + 3, len(TEXT)])
def test_blocks_that_are_not_put_do_not_count_as_used(
    exact: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A cache of which only the beginning is exact, and a store that knows all of the text."""
    store, cache = PrefixStore(tmp_path, 1 << 20, fingerprint="a model", block_size=SIZE), _cache()
    store.put(TEXT, cache)
    paths = [store._blocks.path(key) for key in store._chain(TEXT)]
    for path in paths:
        os.utime(path, (0, 0))
    monkeypatch.setattr(KVCache, "exact_len", exact)
    assert store.put(TEXT, cache) == 0
    assert [path.stat().st_mtime > 0 for path in paths] == [n < exact // SIZE for n in range(3)]


def test_defaults_are_no_salt_and_blocks_of_64(tmp_path: Path) -> None:
    plain = PrefixStore(tmp_path, 1 << 20, fingerprint="a model")
    text = list(range(64))
    assert plain.put(text, _cache(length=64)) == 1
    said = PrefixStore(tmp_path, 1 << 20, fingerprint="a model", block_size=64, salt="")
    assert (said.find(text), repr(said)) == (64, repr(plain))
