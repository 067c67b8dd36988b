"""Speed of the compiled kernel beside those that run without it, and beside SDPA if no pair is hidden."""

from collections.abc import Iterator
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor

import saccade as sc
from benchmarks.checking import assert_agree
from benchmarks.conditions import lacking
from benchmarks.measuring import Referee, compare
from benchmarks.problem import Problem
from benchmarks.racing import sides
from benchmarks.reporting import Row, ratio_row
from saccade import masks
from saccade.engine.kernels.native import abilities
from saccade.positions import ALiBi

HEADS, DIM, WIDTH = 8, 64, 256
TITLE = f"compiled kernel, {HEADS} heads of {DIM}"
TITLE_ZH = f"编译的内核，{HEADS} 个头，每头宽 {DIM}"
FULL_N, FULL = 2048, {torch.float32: 1.1, torch.bfloat16: 1.4}
_NEAR = masks.Window(WIDTH, WIDTH)


class Case(NamedTuple):
    """A problem that two kernels run."""

    name: str
    mask: masks.Mask | None
    n: int
    options: dict[str, Any]
    other: str
    target: float | None = None


CASES = (
    Case(f"window ±{WIDTH}", _NEAR, 8192, {}, "fused", 1.5),
    Case("causal", masks.Causal(), 4096, {}, "fused", 1.0),
    Case("full", None, 2048, {}, "fused", 1.0),
    Case("Longformer", masks.longformer(2 * WIDTH, [0]), 8192, {}, "fused", 1.0),
    Case("BigBird", masks.bigbird(64, random_blocks=3), 4096, {}, "fused", 1.0),
    Case(f"window ±{WIDTH}, dropout 0.1", _NEAR, 4096, {"dropout_p": 0.1}, "tiled", 2.0),
    Case(f"causal window {WIDTH}, ALiBi", masks.sliding_window(WIDTH), 4096, {"bias": ALiBi(HEADS)}, "fused", 2.0),
)


def tensors(n: int, dtype: torch.dtype) -> list[Tensor]:
    """Return query, key and value, and the gradient of the output."""
    torch.manual_seed(0)
    return [torch.randn(1, HEADS, n, DIM).to(dtype).requires_grad_(i < 3) for i in range(4)]


def run(case: Case, its: list[Tensor], impl: str, *, backward: bool = False) -> tuple[Tensor, ...]:
    """Run this library."""
    torch.manual_seed(0)  # of the dropout
    with torch.set_grad_enabled(backward):
        out = sc.attention(*its[:3], case.mask, impl=impl, **case.options)
    return torch.autograd.grad(out, its[:3], its[3]) if backward else (out,)


def check(case: Case, its: list[Tensor]) -> None:
    """Check that both kernels agree, forward and backward."""
    for backward in (False, True):
        both = (run(case, its, impl, backward=backward) for impl in ("native", case.other))
        for own, other in zip(*both, strict=True):
            assert_agree(own, other)


def measure(referee: Referee) -> Iterator[Row]:
    """Measure this question and return its rows; none if the compiled kernel is not installed."""
    level = abilities()
    for dtype in [torch.float32, torch.bfloat16][: 0 if level is None else 2 if level >= 3 else 1]:
        name = str(dtype).removeprefix("torch.")
        for case in CASES:
            its = tensors(case.n, dtype)
            check(case, its)
            for backward in (False, True):
                both = [partial(run, case, its, impl, backward=backward) for impl in ("native", case.other)]
                pair = compare(*both, rounds=5, referee=referee)
                told = f"{case.name}, n={case.n:,}, {name}{', with backward' if backward else ''}"
                yield ratio_row(told, pair, peer=case.other, target=case.target)
        turns = sides(Problem(None, n=FULL_N, dtype=dtype), ["native", "sdpa"]).race(referee, 15)
        yield turns.row(f"full, n={FULL_N:,}, {name}", "native", "sdpa", 1.0 if lacking(dtype) else FULL[dtype], "")
