"""How much faster is the compiled kernel than the others, and than SDPA; also on a busy machine?"""

import itertools
import multiprocessing
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn import functional as F

import saccade as sc
from benchmarks.checking import assert_agree
from benchmarks.measuring import Referee, compare
from benchmarks.reporting import Row, ratio_row
from saccade import masks
from saccade.engine.kernels.native import abilities
from saccade.positions import ALiBi

HEADS, DIM, WIDTH = 8, 64, 256
TITLE = f"compiled kernel, {HEADS} heads of {DIM}"
_NEAR = masks.Window(WIDTH, WIDTH)


class Case(NamedTuple):
    """What is computed, by two kernels."""

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
    """Query, key and value, and the gradient of the output."""
    torch.manual_seed(0)
    return [torch.randn(1, HEADS, n, DIM).to(dtype).requires_grad_(i < 3) for i in range(4)]


def run(case: Case, its: list[Tensor], impl: str, *, backward: bool = False) -> tuple[Tensor, ...]:
    """One side."""
    torch.manual_seed(0)  # of the dropout
    with torch.set_grad_enabled(backward):
        out = sc.attention(*its[:3], case.mask, impl=impl, **case.options)
    return torch.autograd.grad(out, its[:3], its[3]) if backward else (out,)


def check(case: Case, its: list[Tensor]) -> None:
    """Both kernels agree, forward and backward."""
    for backward in (False, True):
        sides = (run(case, its, impl, backward=backward) for impl in ("native", case.other))
        for own, other in zip(*sides, strict=True):
            assert_agree(own, other)


@contextmanager
def busy(processes: int = 2) -> Iterator[None]:
    """Other processes that keep as many cores busy."""
    context = multiprocessing.get_context("spawn")
    others = [context.Process(target=_spin, daemon=True) for _ in range(processes)]
    for other in others:
        other.start()
    try:
        yield
    finally:
        for other in others:
            other.terminate()
            other.join()


def _spin() -> None:
    for _ in itertools.count():
        pass


def measure(referee: Referee) -> Iterator[Row]:
    """Rows of this question; none where the compiled kernel is not installed."""
    level = abilities()
    for dtype in [torch.float32, torch.bfloat16][: 0 if level is None else 2 if level >= 3 else 1]:
        name = str(dtype).removeprefix("torch.")
        for case in CASES:
            its = tensors(case.n, dtype)
            check(case, its)
            for backward in (False, True):
                sides = [partial(run, case, its, impl, backward=backward) for impl in ("native", case.other)]
                pair = compare(*sides, rounds=5, referee=referee)
                told = f"{case.name}, n={case.n:,}, {name}{', with backward' if backward else ''}"
                yield ratio_row(told, pair, peer=case.other, target=case.target)
        yield _beside_sdpa(name, [x.detach() for x in tensors(2048, dtype)[:3]], referee)
        yield _on_a_busy_machine(name, tensors(CASES[0].n, dtype), referee)


def _beside_sdpa(name: str, its: list[Tensor], referee: Referee) -> Row:
    ours, theirs = partial(sc.attention, *its, impl="native"), partial(F.scaled_dot_product_attention, *its)
    assert_agree(ours(), theirs())
    pair = compare(ours, theirs, rounds=15, referee=referee)
    return ratio_row(f"full, n=2,048, {name}", pair, peer="SDPA", target=1.0)


def _on_a_busy_machine(name: str, its: list[Tensor], referee: Referee) -> Row:
    case = CASES[0]
    ours, theirs = (partial(run, case, its, impl) for impl in ("native", case.other))
    quiet = compare(ours, theirs, rounds=5, referee=referee).ours
    with busy():
        pair = compare(ours, theirs, rounds=5, referee=Referee(patience=0.0))
    row = ratio_row(f"{case.name}, {name}, beside two busy processes", pair, peer=case.other, target=1.0)
    measured = f"{row.measured}; {pair.ours / quiet:.1f} of its quiet time"
    return row._replace(measured=measured, figures=row.figures | {"of_quiet": pair.ours / quiet}, quiet=True, rate=None)
