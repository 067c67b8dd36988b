"""PrefixStore in a folder where other things stand: links, folders, files that belong to others."""

import errno
import os
import signal
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from saccade.caches import KVCache, PrefixStore, files
from saccade.caches.files.tensor_files import read_plain

SIZE = 4
TEXT = list(range(3 * SIZE + 1))


def _cache() -> KVCache:
    cache = KVCache()
    torch.manual_seed(1)
    cache.fill(*(torch.randn(1, 2, len(TEXT), 3) for _ in range(2)))
    return cache


def _store(folder: Path, max_bytes: int = 1 << 20) -> PrefixStore:
    return PrefixStore(folder, max_bytes, fingerprint="a model", block_size=SIZE)


def _blocks(store: PrefixStore) -> list[Path]:
    return [store._blocks.path(key) for key in store._chain(TEXT)]


def _outside(tmp_path: Path, path: Path) -> Path:
    """A block's folder moved out of the store, and a link to it in its place."""
    place = tmp_path / "outside"
    path.parent.rename(place)
    path.parent.symlink_to(place, target_is_directory=True)
    (place / f"{'0' * 64}.block").write_bytes(b"mine")
    (place / f".{'0' * 64}.block.{'0' * 16}.part").write_bytes(b"mine")
    os.utime(place / f".{'0' * 64}.block.{'0' * 16}.part", (0, 0))
    return place


def _held(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in folder.iterdir()}


def test_a_link_to_a_folder_is_not_followed(tmp_path: Path) -> None:
    store = _store(tmp_path / "store")
    assert store.put(TEXT, _cache()) == 3
    each = store.nbytes // 3
    path = _blocks(store)[1]
    place = _outside(tmp_path, path)
    before = _held(place)
    (place / path.name).write_bytes(b"damaged")
    before[path.name] = b"damaged"
    assert store.nbytes == 2 * each
    assert (store.find(TEXT), store.restore(TEXT, KVCache())) == (SIZE, SIZE)
    with pytest.raises(ValueError, match=r"^PrefixStore: folder must be a folder that this process can read and wr"):
        store.put(TEXT, _cache())
    store.clear()
    assert (
        _store(tmp_path / "store", max_bytes=each).put(list(range(99, 99 + SIZE)), _cache_of(SIZE)) == 1
    )  # makes room
    assert _held(place) == before
    assert path.parent.is_symlink()


def _cache_of(length: int) -> KVCache:
    cache = KVCache()
    cache.fill(*(torch.randn(1, 2, length, 3) for _ in range(2)))
    return cache


@pytest.mark.parametrize("to", ["file", "nothing"])
def test_a_link_in_a_block_s_place_is_no_block(to: str, tmp_path: Path) -> None:
    store = _store(tmp_path / "store")
    store.put(TEXT, _cache())
    path, mine = _blocks(store)[1], tmp_path / "mine"
    path.replace(mine)
    if to == "nothing":
        mine.unlink()
    path.symlink_to(mine)
    assert (store.find(TEXT), store.restore(TEXT, KVCache())) == (SIZE, SIZE)
    store.clear()
    assert mine.exists() == (to == "file")
    assert store.put(TEXT, _cache()) == 3  # in place of the link
    assert not path.is_symlink()
    assert mine.exists() == (to == "file")


def test_foreign_files_are_left_alone(tmp_path: Path) -> None:
    store = _store(tmp_path)
    store.put(TEXT, _cache())
    size = store.nbytes
    names = ("ab/notes.block", "ab/x.part", "xy/" + "0" * 64 + ".block", "ab/" + "0" * 64 + ".txt", "0" * 64 + ".block")
    for name in names:
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_bytes(b"mine")
        os.utime(tmp_path / name, (0, 0))
    assert store.nbytes == size
    store.clear()
    assert all((tmp_path / name).read_bytes() == b"mine" for name in names)
    assert store.nbytes == 0


def _put(store: PrefixStore) -> object:
    return store.put(TEXT, _cache())


def _made(path: Path, what: str) -> None:
    """Something else in the place of a file or folder of the store."""
    path.parent.mkdir(parents=True, exist_ok=True)
    {
        "folder": path.mkdir,
        "file": path.touch,
        "link": lambda: path.symlink_to("elsewhere"),
        "pipe": lambda: os.mkfifo(path),
    }[what]()


@pytest.mark.parametrize("what", ["folder", "link", "pipe"])
def test_a_foreign_object_at_a_lock_path_is_reported(what: str, tmp_path: Path) -> None:
    if what == "pipe":
        store = _store(tmp_path)  # a pipe can be locked like a file, and nothing is read from it
        _made(tmp_path / "lock", what)
        assert _put(store) == 3
    else:
        store = _store(tmp_path)
        _made(tmp_path / "lock", what)
        for call in (_put, PrefixStore.clear):
            with pytest.raises(ValueError, match=r"PrefixStore[.\w]*: folder must be a folder .* at .*lock\.$"):
                call(store)
        assert not (tmp_path / "elsewhere").exists()


@pytest.mark.parametrize("what", ["folder", "pipe"])
def test_a_foreign_object_at_a_block_path_is_a_miss(what: str, tmp_path: Path) -> None:
    store = _store(tmp_path)
    store.put(TEXT, _cache())
    path = _blocks(store)[1]
    path.unlink()
    _made(path, what)
    assert (store.find(TEXT), store.restore(TEXT, KVCache())) == (SIZE, SIZE)
    if what == "folder":
        with pytest.raises(ValueError, match=r"^PrefixStore: folder must be .*; got Is a directory at .*\.block\.$"):
            _put(store)
    store.clear()
    assert path.exists()


def test_a_file_in_a_folder_s_place_is_said(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(ValueError, match=r"^PrefixStore: folder must be .*; got File exists at .*file\.$"):
        _store(tmp_path / "file")
    store = _store(tmp_path / "store")
    _blocks(store)[0].parent.touch()
    with pytest.raises(ValueError, match=r"^PrefixStore: folder must be .*; got File exists at "):
        _put(store)


def _forbidden(monkeypatch: pytest.MonkeyPatch, name: str, matches: Callable[[str], bool]) -> None:
    """Forbid a call of the system, as it is where files are another user's (root is forbidden nothing)."""
    real = getattr(os, name)

    def call(path: object, *others: object, **how: object) -> object:
        if isinstance(path, str | os.PathLike) and matches(os.fspath(path)):
            raise PermissionError(errno.EACCES, os.strerror(errno.EACCES), path)
        return real(path, *others, **how)

    monkeypatch.setattr(os, name, call)


def test_a_block_that_may_not_be_read_is_missing_and_stays(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    store = _store(tmp_path)
    store.put(TEXT, _cache())
    path = _blocks(store)[1]
    _forbidden(monkeypatch, "open", lambda name: name == str(path))
    assert store.restore(TEXT, KVCache()) == SIZE
    assert path.is_file()


def test_a_folder_that_may_not_be_looked_into_is_missing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    store = _store(tmp_path)
    store.put(TEXT, _cache())
    size = store.nbytes
    path = _blocks(store)[1]
    for name in ("lstat", "stat", "open", "scandir"):
        _forbidden(monkeypatch, name, lambda name: name.startswith(str(path.parent)))
    assert (store.find(TEXT), store.restore(TEXT, KVCache())) == (SIZE, SIZE)
    assert store.nbytes == size - size // 3
    with pytest.raises(ValueError, match=r"^PrefixStore: folder must be .*; got Permission denied at "):
        _put(store)


def test_missing_permissions_are_reported(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    store = _store(tmp_path)
    store.put(TEXT, _cache())
    size, path = store.nbytes, _blocks(store)[1]
    for name in ("unlink", "remove"):
        _forbidden(monkeypatch, name, lambda name: name == str(path))
    with pytest.raises(
        ValueError, match=r"^PrefixStore: folder must be .* may be removed; " r"got 1 that may not be removed, su"
    ):
        store.clear()
    assert store.nbytes == size // 3  # the others are gone
    small = _store(tmp_path, max_bytes=size // 3)
    assert small.put(list(range(50, 50 + SIZE)), _cache_of(SIZE)) == 0  # no room can be made
    _forbidden(monkeypatch, "open", lambda name: name.endswith("lock"))
    for call in (PrefixStore.clear, _put):
        with pytest.raises(
            ValueError, match=r"^PrefixStore[.\w]*: folder must be .*; got Permission denied at .*lock\.$"
        ):
            call(store)


def test_a_disk_that_is_full_stays_an_error_of_the_system(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*_: object) -> int:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    store = _store(tmp_path)
    monkeypatch.setattr(os, "write", full)
    with pytest.raises(OSError, match="No space left"):
        _put(store)


CRAFTED: dict[str, Callable[[dict[str, torch.Tensor]], object]] = {
    "flat keys": lambda held: held.update({"0.key": held["0.key"][0]}),
    "codes": lambda held: held.update({"0.key": held["0.key"].long()}),
    "nothing but codes": lambda held: held.update({name: x.long() for name, x in held.items()}),
    "fewer values": lambda held: held.update({"0.value": held["0.value"][:, :, :2]}),
    "another type": lambda held: held.update({"0.value": held["0.value"].double()}),
    "another size": lambda held: held.update({name: x[:, :, :2] for name, x in held.items()}),
    "two texts": lambda held: held.update({name: x.repeat(2, 1, 1, 1) for name, x in held.items()}),
    "another width": lambda held: held.update({name: x[..., :2] for name, x in held.items()}),
    "no values": lambda held: held.pop("0.value"),
}


@pytest.mark.parametrize("place", [0, 1])
@pytest.mark.parametrize("name", CRAFTED)
def test_a_block_with_a_fitting_checksum_that_is_none_is_missing(name: str, place: int, tmp_path: Path) -> None:
    store = _store(tmp_path)
    store.put(TEXT, _cache())
    path = _blocks(store)[place]
    held, about = files.read_tensors(path, "block of a prefix")
    CRAFTED[name](held)
    about = {key: x for key, x in about.items() if key not in ("version", "checksum")}
    files.write_whole(path, files.encoded(held, about))
    cache = KVCache()
    # Only beside others does a width show to be another one.
    known = SIZE if name == "another width" else place * SIZE
    assert store.restore(TEXT, cache) == known
    assert cache.length == known
    assert path.exists() == (name == "another width")


def test_a_link_is_not_read_and_nothing_is_awaited_from_a_pipe(tmp_path: Path) -> None:
    (tmp_path / "file").write_bytes(b"mine")
    (tmp_path / "link").symlink_to(tmp_path / "file")
    os.mkfifo(tmp_path / "pipe")
    assert read_plain(tmp_path / "file") == b"mine"
    with pytest.raises(OSError, match="symbolic links"):
        read_plain(tmp_path / "link")

    def late(*_: object) -> None:
        raise AssertionError("it waits")

    before = signal.signal(signal.SIGALRM, late)
    signal.setitimer(signal.ITIMER_REAL, 20)
    try:
        found = read_plain(tmp_path / "pipe")
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)
    assert found == b""


def test_room_is_made_until_a_larger_block_fits(tmp_path: Path) -> None:
    store = _store(tmp_path)
    assert store.put(TEXT, _cache()) == 3
    wide = KVCache()
    wide.fill(*(torch.randn(1, 2, SIZE, 10) for _ in range(2)))
    full = _store(tmp_path, max_bytes=store.nbytes)
    assert full.put(list(range(70, 70 + SIZE)), wide) == 1
    assert full.nbytes <= full.max_bytes
    assert full.find(list(range(70, 70 + SIZE))) == SIZE


def test_room_for_a_beginning_is_made_by_what_comes_after_it(tmp_path: Path) -> None:
    store = _store(tmp_path / "in" / "a folder")  # that is made
    assert store.put(TEXT, _cache()) == 3
    small = _store(tmp_path / "in" / "a folder", max_bytes=store.nbytes // 2)
    for place in (0, 2):
        _blocks(store)[place].unlink()
    assert small.put(TEXT, _cache()) == 1
    assert [path.exists() for path in _blocks(store)] == [True, False, False]


def test_old_blocks_stay_and_old_unfinished_files_go(tmp_path: Path) -> None:
    store = _store(tmp_path)
    store.put(TEXT, _cache())
    size, paths = store.nbytes, _blocks(store)
    young, old = (paths[0].parent / f".{'0' * 64}.block.{name}.part" for name in ("0" * 16, "f" * 16))
    for path in (young, old):
        path.write_bytes(b"unfinished")
    for path in (paths[1], old):
        os.utime(path, (0, 0))
    assert store.nbytes == size + len(b"unfinished")
    assert [path.exists() for path in (*paths, young, old)] == [True] * 4 + [False]


def test_the_last_token_is_left_to_be_read(tmp_path: Path) -> None:
    store = PrefixStore(tmp_path, 1 << 20, fingerprint="a model", block_size=1)
    assert store.put(TEXT, _cache()) == len(TEXT)
    for length in (0, 1, 2, len(TEXT)):
        assert store.restore(TEXT[:length], KVCache()) == max(0, length - 1)
    for tokens in (b"ab", "", {0, 1}, 3, [True, False], [0, 1.0]):
        with pytest.raises(TypeError, match="tokens must be the tokens of one text, a list of ints; got "):
            store.find(tokens)
    assert store.find(torch.tensor(TEXT)) == store.find(tuple(TEXT)) == len(TEXT)
