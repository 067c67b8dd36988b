"""Cost of a short sequence beside SDPA, where every microsecond of Python shows."""

import itertools
from collections.abc import Iterator
from typing import NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional as F

import saccade as sc
from benchmarks.checking import assert_agree
from benchmarks.measuring import Referee, compare
from benchmarks.reporting import Row, duration
from saccade import masks
from saccade.nn import from_torch

SIZES, HEADS, DIM = (16, 64, 128, 256, 512), 8, 64
LAYER_SIZES = (16, 64, 256)
TITLE = f"short sequences, {HEADS} heads of {DIM}, float32"
TITLE_ZH = f"短序列，{HEADS} 个头，每头宽 {DIM}，float32"
MOST, MOST_OF_LAYERS = 1.3, 1.2  # times as long as torch
_CAUSAL = masks.Causal()


class Case(NamedTuple):
    """The inputs, whether they are causal, and whether gradients are computed, too."""

    tensors: list[Tensor]
    causal: bool
    trains: bool

    def ours(self) -> list[Tensor]:
        """Run this library."""
        return self._results(sc.attention(*self.tensors, _CAUSAL if self.causal else None))

    def theirs(self) -> list[Tensor]:
        """Run the peer that this library is compared with."""
        return self._results(F.scaled_dot_product_attention(*self.tensors, is_causal=self.causal))

    def _results(self, out: Tensor) -> list[Tensor]:
        return [out, *torch.autograd.grad(out, self.tensors, torch.ones_like(out))] if self.trains else [out]


class LayerCase:
    """Torch's layer and this library's with the same weights, and their input."""

    def __init__(self, n: int, trains: bool):
        width = HEADS * DIM
        self.peer = nn.MultiheadAttention(width, HEADS, batch_first=True)
        self.own = from_torch(self.peer)
        self.input = torch.randn(1, n, width, requires_grad=trains)
        self.trains = trains

    def ours(self) -> list[Tensor]:
        """Run this library's layer."""
        return self._results(self.own(self.input))

    def theirs(self) -> list[Tensor]:
        """Run torch's layer."""
        return self._results(self.peer(self.input, self.input, self.input, need_weights=False)[0])

    def _results(self, out: Tensor) -> list[Tensor]:
        return [out, *torch.autograd.grad(out, [self.input], torch.ones_like(out))] if self.trains else [out.detach()]


def case(n: int, causal: bool, trains: bool) -> Case:
    """Return random inputs."""
    return Case([torch.randn(1, HEADS, n, DIM, requires_grad=trains) for _ in range(3)], causal, trains)


def check(its: Case | LayerCase) -> None:
    """Check that both sides agree."""
    for own, other in zip(its.ours(), its.theirs(), strict=True):
        assert_agree(own, other)


def measure(referee: Referee) -> Iterator[Row]:
    """Measure this question and return its rows."""
    for n, causal, trains in itertools.product(SIZES, (False, True), (False, True)):
        name = f"{'causal' if causal else 'full'}, n={n}{', with backward' if trains else ''}"
        yield _row(name, case(n, causal, trains), n, trains, MOST, "SDPA", referee)
    for n, trains in itertools.product(LAYER_SIZES, (False, True)):
        name = f"layer, n={n}{', with backward' if trains else ''}"
        with torch.set_grad_enabled(trains):
            yield _row(name, LayerCase(n, trains), n, trains, MOST_OF_LAYERS, "nn.MultiheadAttention", referee)


def _row(name: str, its: Case | LayerCase, n: int, trains: bool, most: float, peer: str, referee: Referee) -> Row:
    check(its)
    rounds = (1000 if n <= 128 else 200) // (2 if trains else 1)
    pair = compare(its.ours, its.theirs, rounds=rounds, referee=referee, batch=rounds // 4, warm_up=50)
    return Row(
        name,
        f"{pair.ours / pair.theirs:.2f}x: {duration(pair.ours)}, {peer} {duration(pair.theirs)}",
        f"at most {most:g}x",
        pair.ours <= most * pair.theirs,
        {"ratio": pair.ratio, "ours_s": pair.ours, "theirs_s": pair.theirs},
        pair.rate,
        pair.quiet,
    )
