"""Cost of additive attention beside its usual form, which builds a tensor of queries x keys x hidden units."""

import functools
from collections.abc import Iterator
from typing import NamedTuple

import torch
from torch import Tensor

import saccade as sc
from benchmarks.checking import assert_agree
from benchmarks.measuring import Call, Referee, compare
from benchmarks.memory import Job, extra_bytes
from benchmarks.reporting import Row, memory_row, ratio_row
from saccade import scores

N, DIM = 4096, 64
TITLE = f"additive attention, n={N}, one head of {DIM}, {DIM} hidden units, float32"
TITLE_ZH = f"加性注意力，{N:,} 个词元，一个宽 {DIM} 的头，{DIM} 个隐藏单元，float32"
MEMORY_TARGET = 50.0


class Case(NamedTuple):
    """Random inputs and weights of additive attention."""

    tensors: list[Tensor]
    score: scores.Additive
    grad: Tensor

    @property
    def leaves(self) -> list[Tensor]:
        """Return the tensors that get gradients."""
        return [*self.tensors, *self.score.parameters()]

    def ours(self) -> Tensor:
        """Run this library."""
        return sc.attention(*self.tensors, score=self.score)

    def theirs(self) -> Tensor:
        """Run the usual formulation."""
        query, key, value = self.tensors
        q, k = query @ self.score.query_weight.mT, key @ self.score.key_weight.mT
        hidden = torch.tanh(q[:, :, :, None] + k[:, :, None])
        return (hidden @ self.score.output_weight).softmax(-1) @ value

    def ours_both(self) -> tuple[Tensor, ...]:
        """Run forward and backward."""
        return torch.autograd.grad(self.ours(), self.leaves, self.grad)

    def theirs_both(self) -> tuple[Tensor, ...]:
        """Run forward and backward."""
        return torch.autograd.grad(self.theirs(), self.leaves, self.grad)

    def ours_forward(self) -> Tensor:
        """Run forward without gradients."""
        with torch.no_grad():
            return self.ours()

    def theirs_forward(self) -> Tensor:
        """Run forward without gradients."""
        with torch.no_grad():
            return self.theirs()


def case(n: int = N) -> Case:
    """Return random inputs, the same in every run."""
    torch.manual_seed(0)
    tensors = [torch.randn(1, 1, n, DIM, requires_grad=True) for _ in range(3)]
    return Case(tensors, scores.Additive(DIM, DIM, DIM), torch.randn(1, 1, n, DIM))


def check(its: Case) -> None:
    """Check that outputs and all gradients agree."""
    assert_agree(its.ours_forward(), its.theirs_forward())
    for own, other in zip(its.ours_both(), its.theirs_both(), strict=True):
        size = max(1.0, other.abs().max().item())  # of a weight's gradient, the sum over all pairs
        assert_agree(own / size, other / size)


def memory_of(side: str, n: int = N) -> Call:
    """Return a run of one side for `extra_bytes`, after a first run."""
    getattr(case(64), side)()
    return functools.partial(getattr(case(n), side))


def measure(referee: Referee) -> Iterator[Row]:
    """Measure this question and return its rows."""
    its = case()
    check(case(512))  # in float32 the other side's gradient of the output weight loses digits with length
    assert_agree(its.ours_forward(), its.theirs_forward())
    for name, way in (("forward", "forward"), ("forward + backward", "both")):
        ours, theirs = f"ours_{way}", f"theirs_{way}"
        pair = compare(getattr(its, ours), getattr(its, theirs), rounds=3, referee=referee)
        yield ratio_row(name, pair, peer="broadcast form", target=1.0)
        own, other = extra_bytes([Job("benchmarks.additive:memory_of", [side]) for side in (ours, theirs)])
        yield memory_row(f"{name}: memory", own, other, peer="broadcast form", target=MEMORY_TARGET)
