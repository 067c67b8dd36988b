"""Tokens are taken back from caches that let tokens go: what comes after is as if they had never come, or refused."""

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from saccade import masks
from saccade.caches import (
    EvictingCache,
    HeavyHitterCache,
    SnapKVCache,
    StoredTokens,
    load_cache,
    padded_positions,
    save_cache,
)
from saccade.mechanisms import Softmax
from saccade.support.errors import UnsupportedError

CAUSAL = masks.Causal()


class SmallestKeys(EvictingCache):
    voting_queries = 0

    def score(self, held: StoredTokens) -> Tensor:
        return -held.key.norm(dim=-1)


class Few(SmallestKeys):
    """The last two queries of each call judge."""

    voting_queries = 2

    def score(self, held: StoredTokens) -> Tensor:
        return held.received


KINDS: dict[str, Callable[[], EvictingCache]] = {
    "own": lambda: SmallestKeys(20, recent=3),
    "heavy": lambda: HeavyHitterCache(20, recent=3),
    "few": lambda: Few(20, recent=3),
    "snap": lambda: SnapKVCache(20, window=3, pool=3),
}


def tokens() -> list[Tensor]:
    torch.manual_seed(0)
    return [torch.randn(2, heads, 60, 4, dtype=torch.float64) for heads in (4, 2, 2)]


class Text:
    """A cache, and a text that it is given in order, of which some tokens may be wrong guesses."""

    def __init__(self, cache: EvictingCache, positions: Tensor | None = None):
        self.cache, self.given, self.positions = cache, tokens(), positions

    def read(self, size: int, wrong: int = 0) -> Tensor:
        start = self.cache.length
        own = [x[:, :, start : start + size].clone() for x in self.given]
        for x in own:
            x[:, :, size - wrong :] *= -2
        where = self.positions[:, :size] if self.positions is not None and start == 0 else None
        return self.cache.attend(Softmax(), *own, mask=CAUSAL, positions=where)

    def rest(self) -> list[Tensor]:
        out = [self.read(size) for size in (1, 4, 1, 7, 1, 9)]
        where, after = self.cache.kv_positions, self.cache.positions(2)
        assert where is not None
        assert after is not None
        return [*out, where, torch.as_tensor(list(after)) if isinstance(after, range) else after]


def assert_same(one: Text, other: Text) -> None:
    for a, b in zip(one.rest(), other.rest(), strict=True):
        torch.testing.assert_close(a, b)


GUESSES = [([3], 0), ([3], 2), ([1, 1, 1], 1), ([2, 1], 1), ([2, 0, 2], 3)]
CASES = [(kind, *guess) for kind in KINDS for guess in GUESSES if kind != "few" or max(guess[0]) < 3]
"""A longer call, in which only two queries vote, cannot be taken back."""


@pytest.mark.parametrize("side", [None, "left"])
@pytest.mark.parametrize("kind, calls, right", CASES, ids=str)
def test_wrong_guesses_go_back(calls: list[int], right: int, kind: str, side: str | None) -> None:
    where = None if side is None else padded_positions([8, 5], side="left")
    one, other = Text(KINDS[kind](), where), Text(KINDS[kind](), where)
    for text in (one, other):
        text.read(8)
    left = right
    for size in calls:
        one.read(size, wrong=size - min(size, left))
        left -= min(size, left)
    fork = one.cache.fork()
    one.cache.crop(8 + right)
    assert (one.cache.length, fork.length) == (8 + right, 8 + sum(calls))
    for _ in range(right):
        other.read(1)
    assert_same(one, other)
    if right:  # and once more, farther
        one, other = Text(fork, where), Text(KINDS[kind](), where)
        other.read(8)
        for length in (8 + right, 8):
            one.cache.crop(length)
        assert_same(one, other)


@pytest.mark.parametrize("kind", ["own", "snap"])
def test_without_judges_it_goes_back_anywhere(kind: str) -> None:
    one, other = Text(KINDS[kind]()), Text(KINDS[kind]())
    one.read(15, wrong=10)
    one.cache.crop(5)
    other.read(5)
    assert_same(one, other)


def test_tokens_after_an_evicted_prompt_can_be_cropped() -> None:
    one, other = Text(KINDS["snap"]()), Text(KINDS["snap"]())
    for text in (one, other):
        text.read(30)
    for size in (1, 5, 1):
        one.read(size, wrong=size)
    one.cache.crop(30)
    with pytest.raises(UnsupportedError, match="by the attention of queries that cropping would remove"):
        one.cache.crop(29)
    assert_same(one, other)


@pytest.mark.parametrize(
    "kind, sizes, length, reason",
    [
        ("heavy", [19, 1, 1], 19, "by the attention of queries that cropping would remove"),
        ("own", [19, 1, 1], 19, "by the attention of queries that cropping would remove"),
        ("few", [8, 3], 9, "only the attention of the last 0 queries is stored"),
    ],
)
def test_a_crop_beyond_the_last_vote_is_refused(kind: str, sizes: list[int], length: int, reason: str) -> None:
    text = Text(KINDS[kind]())
    for size in sizes:
        text.read(size)
    with pytest.raises(UnsupportedError, match=reason):
        text.cache.crop(length)


def test_no_more_than_the_last_queries_are_known() -> None:
    cache, x = HeavyHitterCache(64), torch.randn(1, 2, 50, 4)
    for i in range(50):
        cache.attend(Softmax(), *[x[:, :, i : i + 1]] * 3, mask=CAUSAL)
    with pytest.raises(UnsupportedError, match="only the attention of the last 32 queries is stored"):
        cache.crop(17)
    cache.crop(18)
    assert cache.length == 18


def test_padding_behind_tokens_is_not_taken_for_them() -> None:
    where = padded_positions([8, 5], side="right")
    one, other = (Text(KINDS["snap"](), where) for _ in range(2))
    for text in (one, other):
        text.read(8)
    one.read(3, wrong=3)
    one.cache.crop(8)
    with pytest.raises(UnsupportedError, match="the order of arrival is lost"):
        one.cache.crop(7)
    assert_same(one, other)


def test_a_file_holds_no_rows(tmp_path: object) -> None:
    for kind in ("heavy", "snap"):
        one, other = Text(KINDS[kind]()), Text(KINDS[kind]())
        for text in (one, other):
            text.read(8)
        one.read(2, wrong=2)
        save_cache(one.cache, f"{tmp_path}/cache")
        loaded = load_cache(f"{tmp_path}/cache")
        assert isinstance(loaded, EvictingCache)
        if kind == "heavy":
            with pytest.raises(UnsupportedError, match="only the attention of the last 0 queries is stored"):
                loaded.crop(8)
            loaded.reorder([1, 0])
            continue
        loaded.crop(8)
        one.cache = loaded
        assert_same(one, other)


def test_a_reordered_cache_goes_back() -> None:
    one, other = Text(KINDS["heavy"]()), Text(KINDS["heavy"]())
    for text in (one, other):
        text.read(8)
    one.read(3, wrong=3)
    for text in (one, other):
        text.cache.reorder([1, 1])
    one.cache.crop(8)
    assert_same(one, other)
