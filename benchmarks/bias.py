"""Cost of a trainable bias: a full one, and a table of distances, which SDPA needs expanded to all pairs."""

import functools
from collections.abc import Iterator
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn import functional as F

import saccade as sc
from benchmarks.checking import assert_agree
from benchmarks.measuring import Call, Referee, compare
from benchmarks.memory import Job, extra_bytes
from benchmarks.reporting import Row, memory_row, ratio_row
from saccade import positions

N, HEADS, DIM, REACH = 2048, 8, 64, 128
TITLE = f"trainable bias, n={N}, {HEADS} heads of {DIM}, float32, forward + backward"
TITLE_ZH = f"可训练的偏置，{N:,} 个词元，{HEADS} 个头，每头宽 {DIM}，float32，前向 + 反向"
MEMORY_TARGET = 10.0


class Case(NamedTuple):
    """Inputs, a full bias, and a table of the distances up to `REACH`."""

    tensors: list[Tensor]
    full: Tensor
    table: positions.Clipped
    grad: Tensor

    def ours_full(self) -> tuple[Tensor, ...]:
        """Compute a gradient for every entry of the bias."""
        out = sc.attention(*self.tensors, bias=self.full)
        return torch.autograd.grad(out, [*self.tensors, self.full], self.grad)

    def theirs_full(self) -> tuple[Tensor, ...]:
        """Do the same by SDPA."""
        out = F.scaled_dot_product_attention(*self.tensors, attn_mask=self.full)
        return torch.autograd.grad(out, [*self.tensors, self.full], self.grad)

    def ours_table(self) -> tuple[Tensor, ...]:
        """Compute a gradient for every entry of the table, without a dense bias."""
        out = sc.attention(*self.tensors, bias=self.table)
        return torch.autograd.grad(out, [*self.tensors, self.table.weight], self.grad)

    def theirs_table(self) -> tuple[Tensor, ...]:
        """Do the same by SDPA: expand the bias to all pairs, and sum the gradient over them."""
        at = torch.arange(self.grad.shape[2])
        distance = (at[:, None] - at).clamp(-REACH, REACH) + REACH
        out = F.scaled_dot_product_attention(*self.tensors, attn_mask=self.table.weight[:, distance][None])
        return torch.autograd.grad(out, [*self.tensors, self.table.weight], self.grad)


def case(n: int = N) -> Case:
    """Return random inputs, the same in every run."""
    torch.manual_seed(0)
    table = positions.Clipped(HEADS, REACH)
    torch.nn.init.normal_(table.weight)
    return Case(
        [torch.randn(1, HEADS, n, DIM, requires_grad=True) for _ in range(3)],
        torch.randn(1, HEADS, n, n, requires_grad=True),
        table,
        torch.randn(1, HEADS, n, DIM),
    )


def check(its: Case) -> None:
    """Check that all gradients agree."""
    for ours, theirs in ((its.ours_full, its.theirs_full), (its.ours_table, its.theirs_table)):
        for own, other in zip(ours(), theirs(), strict=True):
            size = max(1.0, other.abs().max().item())  # of a table's entry, the sum over many pairs
            assert_agree(own / size, other / size)


def memory_of(side: str, n: int = N) -> Call:
    """Return a training step of one side for `extra_bytes`, after a first run."""
    getattr(case(256), side)()
    its = case(n)
    if side.endswith("table"):
        its = its._replace(full=torch.zeros(1))
    return functools.partial(getattr(its, side))


def measure(referee: Referee) -> Iterator[Row]:
    """Measure this question and return its rows."""
    its = case()
    check(its)
    pair = compare(its.ours_full, its.theirs_full, rounds=5, referee=referee)
    yield ratio_row("full", pair, peer="SDPA", target=1.0)
    pair = compare(its.ours_table, its.theirs_table, rounds=5, referee=referee)
    yield ratio_row(f"table of {2 * REACH + 1} distances", pair, peer="SDPA, written out", target=1.0)
    ours, theirs = extra_bytes([Job("benchmarks.bias:memory_of", [f"{side}_table"]) for side in ("ours", "theirs")])
    yield memory_row("table: memory", ours, theirs, peer="SDPA", target=MEMORY_TARGET)
