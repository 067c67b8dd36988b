"""Timing: sides in turn, medians of ratios, and a referee that detects a disturbed machine."""

import math
import statistics
import time
from collections.abc import Callable, Sequence
from typing import NamedTuple

import torch

Call = Callable[[], object]


def seconds(call: Call, clock: Callable[[], float] = time.perf_counter) -> float:
    """Return the wall time of one call in seconds."""
    start = clock()
    call()
    return clock() - start


def matmul_rate(dtype: torch.dtype = torch.float32, size: int = 1024, runs: int = 2) -> float:
    """Return the current FLOP/s of a dense product: the best of a few, since disturbances only slow it down."""
    a, b = (torch.randn(size, size).to(dtype) for _ in range(2))
    return 2 * size**3 / min(seconds(lambda: torch.mm(a, b)) for _ in range(runs))


class Referee:
    """Judge of whether the machine is quiet: whether a dense product runs at nearly the best rate seen so far.

    Args:
        rate: measures the product; any unit.
        floor: share of the best rate that counts as quiet.
        samples: measurements from which the first peak is taken; a better one seen later raises it.
        patience: seconds that all waiting together may take.
        most_rounds: of any question, for a quick look.
        clock, sleep: for tests.
    """

    def __init__(
        self,
        rate: Callable[[], float] = matmul_rate,
        *,
        floor: float = 0.8,
        samples: int = 40,
        patience: float = 90.0,
        most_rounds: int | None = None,
        clock: Callable[[], float] = time.perf_counter,
        sleep: Callable[[float], None] = time.sleep,
    ):
        self._rate, self.floor, self.patience, self.most_rounds = rate, floor, patience, most_rounds
        self._clock, self._sleep = clock, sleep
        self.peak = max(rate() for _ in range(samples))

    def look(self) -> float:
        """Measure the current rate, which may be a new peak."""
        rate = self._rate()
        self.peak = max(self.peak, rate)
        return rate

    def rounds(self, wanted: int) -> int:
        """Return the number of rounds to run, at most that of a quick look."""
        return wanted if self.most_rounds is None else min(wanted, self.most_rounds)

    def unruffled(self) -> "Referee":
        """Return a referee for a machine that is busy on purpose: it never waits, and allows as many rounds."""
        return Referee(self._rate, floor=0.0, samples=1, patience=0.0, most_rounds=self.most_rounds)

    def is_quiet(self, rate: float | None = None) -> bool:
        """Return True if a rate (the current one if None) is near the best so far."""
        rate = self.look() if rate is None else rate
        return rate >= self.floor * self.peak

    def wait(self) -> bool:
        """Wait for a quiet moment while patience lasts; return whether it came."""
        start = self._clock()
        while not self.is_quiet():
            left = self.patience - (self._clock() - start)
            if left <= 0:
                self.patience = 0.0
                return False
            self._sleep(min(0.5, left))
        self.patience -= self._clock() - start
        return True


class Rounds(NamedTuple):
    """Times of several calls, taken in turn: ``times[round][call]`` in seconds."""

    times: list[list[float]]
    rate: float
    """The slowest reference product beside a round that counts: compare with the referee's last peak."""
    quiet: bool
    """True if at least half of the rounds asked for were undisturbed; then the others are left out."""

    def median(self, call: int) -> float:
        """Return the median of one call over the rounds."""
        return statistics.median(times[call] for times in self.times)


def in_turn(
    calls: Sequence[Call],
    *,
    rounds: int,
    referee: Referee,
    batch: int = 1,
    warm_up: int = 1,
    clock: Callable[[], float] = time.perf_counter,
) -> Rounds:
    """Time calls in turn, A B A B ..., and repeat the rounds during which the reference was slow.

    Args:
        calls: what is timed.
        rounds: undisturbed rounds wanted. Twice as many are tried.
        referee: looks before and after each batch of rounds.
        batch: rounds between two looks, for calls that are much shorter than the reference product.
        warm_up: rounds that are not timed.
        clock: for tests.
    """
    for _ in range(warm_up):
        for call in calls:
            call()
    rounds = referee.rounds(rounds)
    kept: list[tuple[float, list[float]]] = []
    others: list[tuple[float, list[float]]] = []
    after = referee.look()
    for _ in range(max(1, 2 * rounds // batch)):
        if not referee.is_quiet(after):
            referee.wait()
            after = referee.look()
        before = after
        times = [[seconds(call, clock) for call in calls] for _ in range(batch)]
        after = referee.look()
        rate = min(before, after)
        (kept if referee.is_quiet(rate) else others).extend((rate, row) for row in times)
        if len(kept) >= rounds:
            break
    quiet = 2 * len(kept) >= rounds
    chosen = kept if quiet else kept + others
    return Rounds([row for _, row in chosen], min(rate for rate, _ in chosen), quiet)


class Pair(NamedTuple):
    """The result of two sides: medians in seconds, and the median of the ratios round by round."""

    ours: float
    theirs: float
    ratio: float
    """theirs / ours: how many times faster ours is."""
    rate: float
    quiet: bool


def compare(ours: Call, theirs: Call, *, rounds: int, referee: Referee, batch: int = 1, warm_up: int = 1) -> Pair:
    """Run two sides in turn and compare round by round, so that a drift of the machine affects both."""
    both = in_turn([ours, theirs], rounds=rounds, referee=referee, batch=batch, warm_up=warm_up)
    return Pair(both.median(0), both.median(1), median_ratio(both.times), both.rate, both.quiet)


def median_ratio(times: Sequence[Sequence[float]]) -> float:
    """Return the median over rounds of (second / first)."""
    return statistics.median(theirs / ours for ours, theirs in times)


def slope(sizes: Sequence[float], values: Sequence[float]) -> float:
    """Return the least-squares slope of log(value) against log(size): 1 is linear growth, 2 quadratic."""
    x, y = [math.log(size) for size in sizes], [math.log(value) for value in values]
    return statistics.linear_regression(x, y).slope
