"""Races between sides of one problem: they are checked against each other, then timed in turns."""

from collections.abc import Sequence
from functools import cache, partial
from typing import NamedTuple

import torch
from torch import Tensor

from benchmarks.checking import assert_agree
from benchmarks.conditions import lacking, threads
from benchmarks.measuring import Call, Pair, Referee, Rounds, in_turn, matmul_rate, median_ratio
from benchmarks.problem import Problem
from benchmarks.reporting import Row, asked, duration, ratio_row
from benchmarks.sides import SIDES, Side, UnfitError
from saccade.support.errors import UnsupportedError


def run(its: Problem, side: Side, dropout_p: float) -> tuple[Tensor, ...]:
    """Run one side; return its output, and its gradients if the problem has them."""
    with torch.set_grad_enabled(its.backward):
        out = side.forward(dropout_p)
    return (out, *torch.autograd.grad(out, its.tensors, its.grad)) if its.backward else (out,)


@cache
def matmul_peak(dtype: torch.dtype, number: int) -> float:
    """Return the FLOP/s of a dense product with a number of threads, measured once in a run.

    Processors without instructions for a half precision multiply it faster in float32, which then is the peak.
    """
    with threads(number):
        if dtype.itemsize == 2 and matmul_rate(dtype) < matmul_rate() / 2:
            dtype = torch.float32
        return max(matmul_rate(dtype) for _ in range(20))


class Sides(NamedTuple):
    """Sides of a race, and the reasons of those left out; all others are checked against the first."""

    its: Problem
    calls: dict[str, Call]
    notes: dict[str, str]
    left_out: dict[str, str]
    threads: int

    def race(self, referee: Referee, rounds: int) -> "Turns":
        """Time all sides in turn."""
        return Turns(self, list(self.calls), in_turn(list(self.calls.values()), rounds=rounds, referee=referee))


def sides(its: Problem, names: Sequence[str]) -> Sides:
    """Prepare and check sides; dropout, of which each draws its own, is left out of the check."""
    calls: dict[str, Call] = {}
    notes, left_out = {}, {}
    truth: tuple[Tensor, ...] | None = None
    for name in dict.fromkeys(names):
        try:
            side = SIDES[name](its)
            found = run(its, side, 0.0) if side.is_same else ()
        except (UnfitError, UnsupportedError) as error:
            left_out[name] = str(error)
            continue
        truth = found if truth is None else truth
        for own, other in zip(truth, found, strict=True) if found else ():
            assert_agree(own, other)
        calls[name] = partial(run, its, side, its.dropout_p)
        notes[name] = side.note
    return Sides(its, calls, notes, left_out, torch.get_num_threads())


class Turns(NamedTuple):
    """The times of all sides, round by round."""

    sides: Sides
    names: list[str]
    rounds: Rounds

    def seconds(self, name: str) -> float:
        """Return the median time of one side."""
        return self.rounds.median(self.names.index(name))

    def pair(self, ours: str, theirs: str) -> Pair:
        """Return the result of two sides."""
        own, other = self.names.index(ours), self.names.index(theirs)
        ratio = median_ratio([(times[own], times[other]) for times in self.rounds.times])
        return Pair(self.seconds(ours), self.seconds(theirs), ratio, self.rounds.rate, self.rounds.quiet)

    def row(self, case: str, ours: str, theirs: str, target: float | None = None, but: str | None = None) -> Row:
        """Return a row on how many times faster one side is than another; see `asked` for ``but``."""
        missing = [name for name in (ours, theirs) if name not in self.names]
        if missing:
            return Row(case, f"{missing[0]} is left out: {self.sides.left_out[missing[0]]}")
        but = lacking(self.sides.its.dtype) if but is None else but
        note = self.sides.notes[theirs]
        return ratio_row(case, self.pair(ours, theirs), peer=theirs, target=target, note=note, but=but)

    def share_row(self, case: str, name: str, target: float | None = None, but: str | None = None) -> Row:
        """Return a row with one side's rate as a share of a dense product's, and of SDPA's per pair."""
        its, time = self.sides.its, self.seconds(name)
        of_peak = its.flops / time / matmul_peak(its.dtype, self.sides.threads)
        text, figures = f"{of_peak:.0%} of matmul peak: {duration(time)}", {"peak_share": of_peak, "ours_s": time}
        told, met = "", None
        if "sdpa" in self.names:
            share = self.pair(name, "sdpa").ratio * its.pairs / its.dense_pairs
            text = f"{share:.0%} of the dense rate, {text}, dense {duration(self.seconds('sdpa'))}"
            told, met = asked(share, target, lacking(its.dtype) if but is None else but, "at least {:.0%}")
            figures["dense_share"] = share
        return Row(case, text, told, met, figures, self.rounds.rate, self.rounds.quiet)
