"""Cost of a mask that is given as a bool tensor of all pairs."""

from collections.abc import Iterator
from functools import partial

import torch
from torch import Tensor
from torch.nn import functional as F

import saccade as sc
from benchmarks.checking import assert_agree
from benchmarks.conditions import lacking
from benchmarks.measuring import Referee, compare
from benchmarks.reporting import Row, ratio_row
from saccade import masks

BATCH, HEADS, N, DIM = 8, 4, 1024, 64
TITLE = f"bool tensors as masks, batch of {BATCH}, {HEADS} heads of {DIM}, {N:,} x {N:,} pairs, float32"
TITLE_ZH = f"布尔张量作掩码，批大小 {BATCH}，{HEADS} 个头，每头宽 {DIM}，{N:,} × {N:,} 对，float32"
OF_SDPA, OF_CAUSAL = 0.85, 0.95  # the second: as fast, but for what timing leaves open


def case(n: int = N) -> tuple[list[Tensor], dict[str, Tensor]]:
    """Return query, key and value, and masks."""
    torch.manual_seed(0)
    tensors = [torch.randn(BATCH, HEADS, n, DIM) for _ in range(3)]
    half = torch.rand(n, n) < 0.5
    return tensors, {
        "half of the pairs": half.fill_diagonal_(True),
        "causal": torch.ones(n, n, dtype=torch.bool).tril(),
    }


def check(tensors: list[Tensor], mask: Tensor) -> None:
    """Check that both sides agree."""
    assert_agree(sc.attention(*tensors, mask), F.scaled_dot_product_attention(*tensors, attn_mask=mask))


def measure(referee: Referee) -> Iterator[Row]:
    """Measure this question and return its rows."""
    tensors, given = case()
    for name, mask in given.items():
        check(tensors, mask)
        ours = partial(sc.attention, *tensors, mask)
        theirs = partial(F.scaled_dot_product_attention, *tensors, attn_mask=mask)
        pair = compare(ours, theirs, rounds=15, referee=referee)
        yield ratio_row(name, pair, peer="SDPA+mask", target=OF_SDPA, but=lacking())
    pair = compare(ours, partial(sc.attention, *tensors, masks.Causal()), rounds=15, referee=referee, warm_up=3)
    yield ratio_row("causal, after the first look", pair, peer="Causal()", target=OF_CAUSAL, but=lacking())
