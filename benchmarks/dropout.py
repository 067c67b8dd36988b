"""Time and memory of training with dropout beside SDPA's quadratic path."""

import functools
from collections.abc import Iterator
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn import functional as F

import saccade as sc
from benchmarks.checking import assert_agree
from benchmarks.conditions import lacking, no_wheel
from benchmarks.measuring import Call, Referee, compare
from benchmarks.memory import Job, extra_bytes
from benchmarks.reporting import Row, memory_row, ratio_row
from saccade.engine import dropout

HEADS, DIM, P = 8, 64, 0.1
TARGETS = {2048: 2.0, 4096: 9.0}
WITHOUT_WHEEL = {2048: 2.0, 4096: 3.5}
MEMORY_N, MEMORY_TARGET = 6144, 8.0
TITLE = f"dropout {P}, {HEADS} heads of {DIM}, float32, forward + backward"
TITLE_ZH = f"dropout {P}，{HEADS} 个头，每头宽 {DIM}，float32，前向 + 反向"


class Case(NamedTuple):
    """The inputs of one length."""

    tensors: list[Tensor]
    grad: Tensor

    def ours(self) -> tuple[Tensor, ...]:
        """Run this library."""
        return torch.autograd.grad(sc.attention(*self.tensors, dropout_p=P), self.tensors, self.grad)

    def without_wheel(self) -> tuple[Tensor, ...]:
        """Run without saccade-cpu."""
        with no_wheel():
            return self.ours()

    def theirs(self) -> tuple[Tensor, ...]:
        """Run the peer that this library is compared with."""
        out = F.scaled_dot_product_attention(*self.tensors, dropout_p=P)
        return torch.autograd.grad(out, self.tensors, self.grad)


def case(n: int) -> Case:
    """Return random inputs, the same in every run."""
    torch.manual_seed(0)
    return Case([torch.randn(1, HEADS, n, DIM, requires_grad=True) for _ in range(3)], torch.randn(1, HEADS, n, DIM))


def check(its: Case) -> None:
    """Check output and gradients against dense attention with the same weights dropped; SDPA drops others."""
    query, key, value = its.tensors
    b, h, i, j = (torch.arange(size) for size in (1, HEADS, query.shape[2], key.shape[2]))
    kept = dropout.keep(7, b[:, None, None, None], h[:, None, None], i[:, None], j, P)
    weights = (query @ key.mT * DIM**-0.5).softmax(-1)
    dense = (weights * kept / (1 - P)) @ value
    out = sc.AttentionMatrix(query, key).matmul(value, dropout_p=P, seed=7)
    assert_agree(out, dense)
    pairs = zip(*(torch.autograd.grad(x, its.tensors, its.grad) for x in (out, dense)), strict=True)
    for own, other in pairs:
        assert_agree(own, other)


def memory_of(side: str, n: int = MEMORY_N) -> Call:
    """Return a training step of one side for `extra_bytes`, after a first run."""
    getattr(case(256), side)()
    return functools.partial(getattr(case(n), side))


def measure(referee: Referee) -> Iterator[Row]:
    """Measure this question and return its rows."""
    check(case(1024))
    for n, target in TARGETS.items():
        its = case(n)
        rounds = 5 if n < MEMORY_N // 2 else 3
        pair = compare(its.ours, its.theirs, rounds=rounds, referee=referee)
        yield ratio_row(f"n={n:,}", pair, peer="SDPA", target=target, but=lacking())
        pair = compare(its.without_wheel, its.theirs, rounds=rounds, referee=referee)
        yield ratio_row(f"n={n:,}, without the wheel", pair, peer="SDPA", target=WITHOUT_WHEEL[n])
    ours, theirs = extra_bytes([Job("benchmarks.dropout:memory_of", [side]) for side in ("ours", "theirs")])
    yield memory_row(f"n={MEMORY_N:,}: memory", ours, theirs, peer="SDPA", target=MEMORY_TARGET)
