"""Speed: attention beside each of torch's backends, forced one by one; kernels that ran; recompiles over lengths."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Iterator
from typing import NamedTuple

import torch
from torch import Tensor
from torch._dynamo import config
from torch._dynamo.utils import counters

import saccade as sc
from benchmarks.gpu_check.finding import Finding
from benchmarks.gpu_check.peers import COMPILED, PEERS, peer
from benchmarks.gpu_check.scenes import Scene, scenes
from benchmarks.gpu_check.steps import Context
from saccade import masks

__all__ = ["measure"]

_ROUNDS = {"cuda": 12, "cpu": 2, "quick": 1}
_CLOSE = 5e-2  # of 1 + the output: bfloat16, and weights that a backend rounds as well
_RECOMPILES = {"cuda": 20, "cpu": 6, "quick": 2}
_LAST = 20.0  # seconds kept for the recompiles
_SLOWEST = 1.2  # how many times slower than the fastest backend that can run it `auto` may be


class Side(NamedTuple):
    """One side of a comparison: forward, and forward with backward."""

    forward: Callable[[], object]
    both: Callable[[], object]


def measure(context: Context) -> Iterator[Finding]:
    """Yield all cases beside what runs at once, then beside what compiles, then the recompiles."""
    with config.patch(recompile_limit=64):
        for names in ([name for name in PEERS if name not in COMPILED], list(COMPILED)):
            for scene in scenes(context.level):
                if context.left() < (_LAST if context.level == "cuda" else 0.0):
                    yield Finding(str(scene), f"not timed beside {', '.join(names)}: no time was left")
                    continue
                yield from _scene(context, scene, names)
        yield _recompiles(context)


def _scene(context: Context, scene: Scene, names: list[str]) -> Iterator[Finding]:
    """Yield the time of saccade, and its ratio to each backend that runs this."""
    tensors = scene.tensors(context.device.name)
    mask = masks.Causal() if scene.kind == "decode" else scene.mask
    try:
        run = lambda *x: sc.attention(*x, mask)  # noqa: E731
        ours = _side(run, tensors, scene)
        expected = run(*tensors)
    except Exception as error:  # a case that fails must not hide the next
        yield Finding(f"{scene}", f"raised {type(error).__name__}: {' '.join(str(error).split())[:200]}", False)
        context.device.synchronize()
        return
    kernel = sc.AttentionMatrix(*tensors[:2], mask).explain().kernel
    sides, refused, wrong = {"saccade": ours}, [], []
    for name in names:
        try:
            attend = peer(name, scene, context.device)
            error = float(((attend(*tensors) - expected).abs() / (1.0 + expected.abs())).max())
            if not error <= _CLOSE:
                wrong.append(f"{name} differs from saccade by {error:.2g}")
            sides[name] = _side(attend, tensors, scene)
        except Exception as error_:  # backends refuse in many ways; each is told
            refused.append(f"{name}: {' '.join(str(error_).split())[:80] or type(error_).__name__}")
            context.device.synchronize()
    if len(sides) > 1 or names[0] not in COMPILED:
        yield from _timed(context, scene, kernel, sides, refused)
    if wrong:
        yield Finding(f"{scene}: same outputs", "; ".join(wrong), False)
    if names[0] not in COMPILED:
        names_of = context.device.kernels(ours.forward if scene.kind == "decode" else ours.both)
        yield Finding(f"{scene}: kernels", ", ".join(name[:60] for name in names_of[:4]))


def _timed(
    context: Context, scene: Scene, kernel: str, sides: dict[str, Side], refused: list[str]
) -> Iterator[Finding]:
    for way in ("forward",) if scene.kind == "decode" else ("forward", "both"):
        times = _in_turn(context, {name: getattr(side, way) for name, side in sides.items()})
        ours = statistics.median(times["saccade"])
        rate = scene.flops(backward=way == "both") / ours
        figures: dict[str, float | str] = {"seconds": ours, "flops": rate, "kernel": kernel}
        ratios = {}
        for name in sides:
            if name != "saccade":
                pairs = zip(times[name], times["saccade"], strict=True)
                ratios[name] = statistics.median(theirs / mine for theirs, mine in pairs)
        figures |= {f"ratio to {name}": ratio for name, ratio in ratios.items()}
        beside = ", ".join(f"{ratio:.2f}x {name}" for name, ratio in ratios.items()) or "beside nothing"
        told = f"{kernel} {1e3 * ours:.3g} ms, {rate / 1e12:.3g} TFLOP/s; {beside}"
        told += f" (refused: {'; '.join(refused)})" if refused and way == "forward" else ""
        name = f"{scene}, {'forward' if way == 'forward' else 'forward + backward'}"
        yield Finding(name, told, _fast_enough(context, ratios), figures, headline=True)


def _fast_enough(context: Context, ratios: dict[str, float]) -> bool | None:
    """Judge whether no backend is much faster; a rehearsal says nothing about that."""
    return min(ratios.values()) >= 1.0 / _SLOWEST if context.level == "cuda" and ratios else None


def _side(attend: Callable[..., Tensor], tensors: list[Tensor], scene: Scene) -> Side:
    """Return both ways of running a function, once run each."""
    leaves = [x.detach().requires_grad_() for x in tensors]
    grad = torch.ones(1, scene.heads[0], scene.q_len, scene.width, device=tensors[0].device, dtype=tensors[0].dtype)

    def forward() -> Tensor:
        with torch.no_grad():
            return attend(*tensors)

    def both() -> tuple[Tensor, ...]:
        return torch.autograd.grad(attend(*leaves), leaves, grad)

    forward()
    if scene.kind != "decode":
        both()
    return Side(forward, both)


def _in_turn(context: Context, calls: dict[str, Callable[[], object]]) -> dict[str, list[float]]:
    """Return seconds of each call, A B A B ..., after one round that does not count."""
    times: dict[str, list[float]] = {name: [] for name in calls}
    for number in range(_ROUNDS[context.level] + 1):
        for name, call in calls.items():
            seconds = context.device.seconds(call)
            if number:
                times[name].append(seconds)
    return times


def _recompiles(context: Context) -> Finding:
    """Return how many graphs flex compiles over many lengths: two, if torch makes the length a variable."""
    counters.clear()
    done = 0
    for number in range(_RECOMPILES[context.level]):
        if context.left() < 0.0:
            break
        length = 200 + 56 * number
        x = torch.randn(1, 2, length, 64, device=context.device.name, dtype=torch.bfloat16)
        with torch.no_grad():
            sc.attention(x, x, x, masks.Causal(), impl="flex")
        done += 1
    graphs = counters["stats"]["unique_graphs"]
    text = f"{graphs} graphs over {done} lengths"
    return Finding("flex: recompiles", text, None, {"graphs": graphs, "lengths": done}, headline=True)
