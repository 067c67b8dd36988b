"""Speed of a neighbourhood on a grid beside SDPA with a dense mask, and the pairs that squares of rows save."""

import functools
from collections.abc import Iterator
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn import functional as F

import saccade as sc
from benchmarks.checking import assert_agree
from benchmarks.conditions import no_wheel
from benchmarks.measuring import Referee, compare
from benchmarks.reporting import Row, ratio_row
from saccade import masks

SIDE, RADIUS, HEADS, DIM = 64, 7, 8, 64
TITLE = f"neighbourhood of radius {RADIUS} on {SIDE} x {SIDE} cells, {HEADS} heads of {DIM}, float32"
TITLE_ZH = f"{SIDE} × {SIDE} 个格子上半径 {RADIUS} 的邻域，{HEADS} 个头，每头宽 {DIM}，float32"
TARGET = 3.0


class Case(NamedTuple):
    """The inputs, and the mask in the form that each side takes."""

    tensors: list[Tensor]
    mask: masks.Mask
    dense: Tensor
    grad: Tensor

    def ours(self) -> Tensor:
        """Run this library."""
        return sc.attention(*self.tensors, self.mask)

    def sdpa(self) -> Tensor:
        """Run SDPA with an additive mask of 0 and -inf."""
        return F.scaled_dot_product_attention(*self.tensors, attn_mask=self.dense)

    def ours_both(self) -> tuple[Tensor, ...]:
        """Run forward and backward."""
        return torch.autograd.grad(self.ours(), self.tensors, self.grad)

    def sdpa_both(self) -> tuple[Tensor, ...]:
        """Run forward and backward."""
        return torch.autograd.grad(self.sdpa(), self.tensors, self.grad)


def case(side: int = SIDE, radius: int = RADIUS) -> Case:
    """Return random inputs, the same in every run."""
    torch.manual_seed(0)
    n = side * side
    mask = masks.Neighborhood(side, side, radius)
    dense = torch.zeros(n, n).masked_fill_(~mask.to_dense(n)[0, 0], -torch.inf)
    tensors = [torch.randn(1, HEADS, n, DIM, requires_grad=True) for _ in range(3)]
    return Case(tensors, mask, dense, torch.randn(1, HEADS, n, DIM))


def check(its: Case) -> None:
    """Check that outputs and gradients of both sides agree."""
    assert_agree(its.ours(), its.sdpa())
    for own, other in zip(its.ours_both(), its.sdpa_both(), strict=True):
        assert_agree(own, other)


def _pairs(its: Case) -> Row:
    """Return the computed pairs per visible pair, in squares and in the natural order."""
    query, key, _ = its.tensors
    n = query.shape[2]
    visible = its.mask.density(n) * n * n
    own = sc.AttentionMatrix(query, key, its.mask).explain().pairs / HEADS / visible
    with no_wheel():
        squares = sc.AttentionMatrix(query, key, its.mask).explain().pairs / HEADS / visible
    natural = its.mask.plan(n, heads=HEADS).pairs / HEADS / visible
    figures = {"own": own, "squares": squares, "natural": natural}
    text = f"{squares:.2f} for each visible one, {natural:.2f} with rows in their own order, {own:.2f} with the wheel"
    return Row("pairs computed, without the wheel", text, "below 2.5", squares < 2.5, figures)


def measure(referee: Referee) -> Iterator[Row]:
    """Measure this question and return its rows."""
    its = case()
    check(its)
    yield _pairs(its)
    with torch.no_grad():
        pair = compare(its.ours, its.sdpa, rounds=7, referee=referee)
    yield ratio_row("forward", pair, peer="SDPA+mask", target=TARGET)
    ours, theirs = (functools.partial(side) for side in (its.ours_both, its.sdpa_both))
    pair = compare(ours, theirs, rounds=3, referee=referee)
    yield ratio_row("forward + backward", pair, peer="SDPA+mask", target=TARGET)
