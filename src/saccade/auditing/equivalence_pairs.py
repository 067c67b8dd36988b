"""Pairs of equivalent ways of running a model. Each pair returns the rows of one run and the expected rows."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from saccade.auditing.runner import Beside, Runner, Side
from saccade.support.language import Message

_PAD, _SHIFT, _FAR_SHIFT = 8, 13, 1000


class FullRun(NamedTuple):
    """A model in one dtype, with its output rows for the full text."""

    runner: Runner
    whole: Tensor


RunPair = Callable[[FullRun], tuple[Tensor, Tensor]]
"""A function that runs a model in one way and returns two tensors: the rows, and the expected rows."""


def run_pairs(
    runner: Runner, ids: Tensor, *, packed: Sequence[int], padded: bool, cache: bool, against: Sequence[str]
) -> Iterator[tuple[str, RunPair]]:
    """Yield the selected pairs of equivalent ways of running a model, each with the name of its claim."""
    yield "one by one = in a batch", _batched(ids)
    yield "in training, without dropout", lambda full_run: (full_run.runner.trained().whole(ids), full_run.whole)
    yield "positions shifted", lambda full_run: (full_run.runner.shifted(ids, _SHIFT), full_run.whole)
    if padded:
        yield from (("padded at the right", _padded(ids, "right")), ("padded at the left", _padded(ids, "left")))
    if packed:
        yield from _packed(ids[:1], packed)
    if cache:
        yield from _steps(ids, runner.window)
        yield from _cached(ids)
    yield from ((Message("attention by {name}", name=name), _with_implementation(ids, name)) for name in against)


def autocast_pairs(ids: Tensor, lengths: Sequence[int]) -> Iterator[tuple[str, RunPair]]:
    """Yield the pairs of runs that are also compared under autocast, each with the name of its claim.

    Positions are shifted beyond 256, where bfloat16 cannot represent all integers and makes some neighbours equal.
    """
    yield "one by one = in a batch", _batched(ids)
    yield "positions shifted", lambda full_run: (full_run.runner.shifted(ids, _FAR_SHIFT), full_run.whole)
    yield from (("padded at the right", _padded(ids, "right")), ("padded at the left", _padded(ids, "left")))
    yield next(iter(_packed(ids[:1], lengths)))
    yield _split(ids, "two halves", [ids.shape[1] // 2])


def packed_with_our_kernel(ids: Tensor, lengths: Sequence[int]) -> RunPair:
    """Return the pair of runs that compares packed texts with separate texts on saccade's kernel."""
    return lambda full_run: (
        full_run.runner.ours(lengths).packed(ids[:1], lengths),
        _separately(full_run.runner, ids[:1], lengths),
    )


def _batched(ids: Tensor) -> RunPair:
    batch = ids if len(ids) > 1 else torch.cat([ids, ids.flip(1)])

    def run_pair(full_run: FullRun) -> tuple[Tensor, Tensor]:
        return torch.cat([full_run.runner.whole(one) for one in batch.split(1)]), full_run.runner.whole(batch)

    return run_pair


def _padded(ids: Tensor, side: Side) -> RunPair:
    return lambda full_run: (full_run.runner.padded(ids, side, _PAD), full_run.whole)


def _packed(ids: Tensor, lengths: Sequence[int]) -> Iterator[tuple[str, RunPair]]:
    def run_pair(beside: Beside) -> RunPair:
        return lambda full_run: (
            full_run.runner.packed(ids, lengths, beside=beside),
            _separately(full_run.runner, ids, lengths),
        )

    others: tuple[Beside, ...] = ("a cache", "a mask of ones", "a mask of four dimensions")
    yield "packed", run_pair("positions")
    yield from ((Message("packed, with {beside}", beside=Message(beside)), run_pair(beside)) for beside in others)


def _separately(runner: Runner, ids: Tensor, lengths: Sequence[int]) -> Tensor:
    return torch.cat([runner.whole(text) for text in ids.split(list(lengths), 1)], 1)


def _steps(ids: Tensor, window: int | None) -> list[tuple[str, RunPair]]:
    n = ids.shape[1]
    splits: dict[str, Sequence[int]] = {"one token first": [1], "one token last": [n - 1], "two halves": [n // 2]}
    found = [_split(ids, name, cuts) for name, cuts in splits.items()]
    found += [one_by_one(ids), _split(ids, "pieces of 5", range(5, n, 5))]
    return found + (steps_at_window(ids, window) if window else [])


def one_by_one(ids: Tensor) -> tuple[str, RunPair]:
    """Return the claim that decoding token by token equals one run on all ids, as its name and the pair of runs."""
    return _split(ids, "one by one", range(1, ids.shape[1]))


def steps_at_window(ids: Tensor, window: int) -> list[tuple[str, RunPair]]:
    """Return the claims that a run in two chunks, cut at or next to the window's width, equals one run on all ids."""
    cuts = [cut for cut in (window - 1, window, window + 1) if 0 < cut < ids.shape[1]]
    return [_split(ids, Message("cut at {cut}, window {window}", cut=cut, window=window), [cut]) for cut in cuts]


def _split(ids: Tensor, name: str, cuts: Sequence[int]) -> tuple[str, RunPair]:
    words = Message("steps: {name}", name=name if isinstance(name, Message) else Message(name))
    return words, lambda full_run: (full_run.runner.steps(ids, cuts), full_run.whole)


def _cached(ids: Tensor) -> list[tuple[str, RunPair]]:
    """Return pairs of runs that must agree although one of them crops, forks or reorders its cache midway.

    The expected rows come from the same two chunks with an unmodified cache; other pairs compare chunks with a full
    run.
    """
    n, half = ids.shape[1], ids.shape[1] // 2
    other = torch.cat([ids[:, :half], ids.flip(1)[:, : n - half]], 1)

    def cropped(full_run: FullRun) -> tuple[Tensor, Tensor]:
        runner = full_run.runner
        _, state = runner.more(ids[:, :half], runner.start())
        _, state = runner.more(other[:, half:], runner.rewindable(state))
        after, _ = runner.more(ids[:, half:], runner.cropped(state, n - half))
        return _continued(runner.steps(ids, [half]), after)

    def forked(full_run: FullRun) -> tuple[Tensor, Tensor]:
        runner = full_run.runner
        _, state = runner.more(ids[:, :half], runner.start())
        fork = runner.forked(state)
        in_fork, _ = runner.more(other[:, half:], fork)
        after, _ = runner.more(ids[:, half:], state)
        want = torch.cat([runner.steps(ids, [half]), runner.steps(other, [half])])
        return _continued(want, torch.cat([after, in_fork]))

    def reordered(full_run: FullRun) -> tuple[Tensor, Tensor]:
        runner = full_run.runner
        rows = torch.arange(len(ids) - 1, -1, -1) if len(ids) > 1 else torch.zeros(2, dtype=torch.long)
        rows = rows.to(ids.device)
        _, state = runner.more(ids[:, :half], runner.start())
        after, _ = runner.more(ids[rows, half:], runner.reordered(state, rows))
        return _continued(runner.steps(ids, [half])[rows], after)

    return [("cache cropped", cropped), ("cache forked", forked), ("cache reordered", reordered)]


def _continued(want: Tensor, after: Tensor) -> tuple[Tensor, Tensor]:
    """Return ``want`` with its last rows replaced by ``after``, and ``want`` itself; only these rows can differ."""
    return torch.cat([want[:, : want.shape[1] - after.shape[1]], after], 1), want


def _with_implementation(ids: Tensor, name: str) -> RunPair:
    return lambda full_run: (full_run.runner.implemented(name).whole(ids), full_run.whole)
