"""Speed of attention to one block of keys in sixteen, chosen for each query, beside dense attention."""

import math
from collections.abc import Iterator

import torch
from torch import Tensor
from torch.nn import functional as F

from benchmarks.checking import assert_agree
from benchmarks.measuring import Call, Referee, compare
from benchmarks.memory import Job, extra_bytes
from benchmarks.reporting import Row, ratio_row
from saccade.masks import Causal
from saccade.mechanisms import TopK
from saccade.scorers import BlockMeans

N, DIM, SIZE, SHARE = 32_768, 64, 128, 16
TARGETS = {"forward": 2.0, "forward + backward": 3.5}
MOST_MEMORY = 3.0  # of the bytes of query + key + value; the index alone takes a twelfth
TITLE = f"one of {SHARE} blocks of {SIZE} keys, chosen for each query, n={N:,}, one head of {DIM}, float32"
TITLE_ZH = f"每个查询挑选 1/{SHARE} 的块，每块 {SIZE} 个键，{N:,} 个词元，一个头，宽 {DIM}，float32"


class Case:
    """The inputs, and a selection of a sixteenth of the blocks by their means."""

    def __init__(self, n: int = N, size: int = SIZE, *, backward: bool = False):
        torch.manual_seed(0)
        self.tensors = [torch.randn(1, 1, n, DIM, requires_grad=backward) for _ in range(3)]
        self.top = TopK(BlockMeans(), max(1, n // size // SHARE), size)

    def ours(self) -> Tensor:
        """Run with the selection of blocks."""
        query, key, value = self.tensors
        return self.top(query, key, mask=Causal()) @ value

    def dense(self) -> Tensor:
        """Compute it over all keys before each query."""
        return F.scaled_dot_product_attention(*self.tensors, is_causal=True)

    def defined(self) -> Tensor:
        """Compute the definition pair by pair: the local block, and the earlier ones with the highest means."""
        query, key, value = (x.detach().double() for x in self.tensors)
        n, size = query.shape[2], self.top.block_size
        own, blocks = torch.arange(n)[:, None] // size, torch.arange(n // size)
        ranks = query @ key.unflatten(2, (-1, size)).mean(3).mT
        ranks = ranks.masked_fill(blocks == own, math.inf).masked_fill(blocks > own, -math.inf)
        chosen = torch.zeros_like(ranks, dtype=torch.bool).scatter_(3, ranks.topk(self.top.k).indices, True)
        allowed = chosen.repeat_interleave(size, 3) & torch.ones(n, n, dtype=torch.bool).tril()
        return F.scaled_dot_product_attention(query, key, value, allowed).float()


def check(its: Case) -> None:
    """Check our output against the definition."""
    assert_agree(its.ours().detach(), its.defined())


def with_gradients(its: Case, run: Call) -> Call:
    """Compute the same and its gradients."""
    weight = torch.randn(its.tensors[0].shape)
    return lambda: torch.autograd.grad(run(), its.tensors, weight)


def memory_of(backward: bool, n: int = N) -> Call:
    """Return one product with its inputs for `extra_bytes`, after a first run."""
    Case(1024).ours()
    its = Case(n, backward=backward)
    return with_gradients(its, its.ours) if backward else its.ours


def measure(referee: Referee) -> Iterator[Row]:
    """Measure this question and return its rows."""
    check(Case(2048, 32))
    for name, target in TARGETS.items():
        its = Case(backward=name != "forward")
        sides: list[Call] = [its.ours, its.dense]
        if name != "forward":
            sides = [with_gradients(its, run) for run in sides]
        pair = compare(*sides, rounds=5, referee=referee)
        yield ratio_row(f"{name}, the choice included", pair, peer="SDPA", target=target)
    inputs = 3 * N * DIM * 4
    jobs = [Job("benchmarks.selection:memory_of", [backward]) for backward in (False, True)]
    for name, extra in zip(TARGETS, extra_bytes(jobs), strict=True):
        yield Row(
            f"{name}: memory",
            f"{extra / inputs:.2f} of the inputs' ({extra / 2**20:.0f} MiB)",
            f"below {MOST_MEMORY:g}" if name == "forward" else "",
            extra < MOST_MEMORY * inputs if name == "forward" else None,
            {"extra_bytes": extra, "input_bytes": inputs},
        )
