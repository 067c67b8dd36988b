"""Speed of a window of ±256 at 8,192 tokens beside SDPA with a dense mask and FlexAttention."""

import functools
from collections.abc import Iterator
from typing import NamedTuple

import torch
from torch import Tensor

import saccade as sc
from benchmarks.conditions import lacking
from benchmarks.measuring import Call, Referee
from benchmarks.memory import Job, extra_bytes
from benchmarks.problem import Problem
from benchmarks.racing import sides
from benchmarks.reporting import Row
from saccade import masks

N, HEADS, DIM, WIDTH = 8192, 8, 64, 256
TITLE = f"window ±{WIDTH}, n={N:,}, {HEADS} heads of {DIM}"
TITLE_ZH = f"窗口 ±{WIDTH}，{N:,} 个词元，{HEADS} 个头，每头宽 {DIM}"
MOST_MEMORY = 4.0  # of the bytes of query + key + value


class Targets(NamedTuple):
    """Targets as a share of the dense rate, against SDPA with a mask, FlexAttention, and SDPA with backward."""

    share: float | None
    mask: float
    flex: float | None
    both: float | None


TARGETS = {torch.float32: Targets(0.85, 18.0, 3.0, 13.0), torch.bfloat16: Targets(0.95, 18.0, 2.0, None)}
WITHOUT_WHEEL = {torch.float32: Targets(None, 8.0, 1.6, 8.0), torch.bfloat16: Targets(None, 6.0, None, None)}


def problem(dtype: torch.dtype, *, n: int = N, width: int = WIDTH, backward: bool = False) -> Problem:
    """Return the window."""
    return Problem(masks.Window(width, width), 1, HEADS, n, DIM, dtype=dtype, backward=backward)


def _forward(dtype: torch.dtype, name: str, referee: Referee) -> Iterator[Row]:
    own = {"ours": (TARGETS[dtype], lacking(dtype)), "no-wheel": (WITHOUT_WHEEL[dtype], "")}
    turns = sides(problem(dtype), [*own, "sdpa", "sdpa+mask", "flex"]).race(referee, 7)
    for who, (targets, but) in own.items():
        said = f"{name}, forward" + ("" if who == "ours" else ", without the wheel")
        yield turns.share_row(said, who, targets.share, but)
        for peer, target in (("sdpa+mask", targets.mask), ("flex", targets.flex)):
            yield turns.row(said, who, peer, target, but)


def _both(dtype: torch.dtype, name: str, referee: Referee) -> Iterator[Row]:
    turns = sides(problem(dtype, backward=True), ["ours", "no-wheel", "sdpa+mask"]).race(referee, 3)
    name = f"{name}, forward + backward"
    yield turns.row(name, "ours", "sdpa+mask", TARGETS[dtype].both)
    yield turns.row(f"{name}, without the wheel", "no-wheel", "sdpa+mask", WITHOUT_WHEEL[dtype].both, "")


def memory_of(backward: bool, n: int = N) -> Call:
    """Return one product with its inputs for `extra_bytes`, after a first run."""
    mask = masks.Window(WIDTH, WIDTH)
    tensors = [torch.randn(1, HEADS, n, DIM, requires_grad=backward) for _ in range(3)]

    def run(tensors: list[Tensor]) -> object:
        out = sc.attention(*tensors, mask)
        if not backward:
            return out
        return torch.autograd.grad(out, tensors, torch.ones(()).expand_as(out))

    run([x.detach()[:, :, :1024].requires_grad_(backward) for x in tensors])
    return functools.partial(run, tensors)


def _memory() -> Iterator[Row]:
    inputs = 3 * HEADS * N * DIM * 4
    names = ("forward", "forward + backward")
    extras = extra_bytes([Job("benchmarks.window:memory_of", [backward]) for backward in (False, True)])
    for name, extra in zip(names, extras, strict=True):
        yield Row(
            f"float32, {name}: memory",
            f"{extra / inputs:.2f} of the inputs' ({extra / 2**20:.0f} MiB)",
            f"below {MOST_MEMORY:g}",
            extra < MOST_MEMORY * inputs,
            {"extra_bytes": extra, "input_bytes": inputs},
        )


def measure(referee: Referee) -> Iterator[Row]:
    """Measure this question and return its rows."""
    for dtype in TARGETS:
        name = str(dtype).removeprefix("torch.")
        yield from _forward(dtype, name, referee)
        yield from _both(dtype, name, referee)
    yield from _memory()
