"""Memory: how it grows with the length, and statistics of a sequence whose matrix would not fit."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

import saccade as sc
from benchmarks.gpu_check.finding import Finding
from benchmarks.gpu_check.steps import Context
from benchmarks.measuring import slope
from saccade import masks
from saccade.statistics import Entropy, Received, TopK

__all__ = ["measure"]

_LENGTHS = {
    "cuda": (8192, 16_384, 32_768, 65_536),
    "cpu": (1024, 2048, 4096),
    "quick": (256, 512),
}
_HEADS, _WIDTH, _MOST_SLOPE = 4, 64, 1.15
_LONG = {"cuda": 131_072, "cpu": 2048, "quick": 300}
_WINDOWS = {"cuda": 1024, "cpu": 64, "quick": 32}
_MOST_FORWARDS = 6.0
_ROWS, _ENTROPY_LIMIT = 8, 1e-3  # rows that are compared with float64; of entropies, which go up to ln of the length


def measure(context: Context) -> Iterator[Finding]:
    """Yield growth and statistics; the mask that FlexAttention has to compile comes last."""
    width = _WINDOWS[context.level]
    rules = {
        "causal": masks.Causal(),
        "window": masks.sliding_window(width),
        "longformer": masks.longformer(width // 2, [0]),
    }
    for name, impl in (("causal", "auto"), ("window", "auto"), ("window", "tiled")):
        yield _growth(context, f"{name}, {impl}", rules[name], impl)
    for name in ("window", "causal"):
        if context.left() < 0.0:
            return
        yield from _statistics(context, name, rules[name])
    yield _growth(context, "longformer, auto", rules["longformer"], "auto")


def _tensors(context: Context, heads: int, length: int) -> list[Tensor]:
    device = context.device.name
    drawn = torch.Generator(device).manual_seed(length)
    made = [torch.randn(1, heads, length, _WIDTH, generator=drawn, device=device) for _ in range(3)]
    return [x.to(torch.bfloat16) for x in made]


def _growth(context: Context, name: str, mask: masks.Mask, impl: Any) -> Finding:
    """Return the slope of memory against length: 1 is linear, 2 is quadratic."""
    peaks: list[int] = []
    lengths = _LENGTHS[context.level]
    title = f"memory, {name}"
    for length in lengths:
        leaves = [x.requires_grad_() for x in _tensors(context, _HEADS, length)]

        def both(leaves: list[Tensor] = leaves) -> tuple[Tensor, ...]:
            out = sc.attention(*leaves, mask, impl=impl)
            return torch.autograd.grad(out, leaves, torch.ones_like(out))

        try:
            both()  # what is kept for later calls is made outside of the measurement
            peaks.append(context.device.peak_bytes(both))
        except Exception as error:  # out of memory is a result
            return Finding(title, f"length {length:,} raised {type(error).__name__}: {str(error)[:150]}", False)
    rise = slope(lengths, [max(1, peak) for peak in peaks])
    told = ", ".join(f"{peak / 2**20:.0f}" for peak in peaks)
    text = f"slope {rise:.2f} from {lengths[0]:,} to {lengths[-1]:,} tokens ({told} MiB), at most {_MOST_SLOPE}"
    # A rehearsal counts all memory that was allocated, not the peak.
    ok = rise <= _MOST_SLOPE if context.level == "cuda" else None
    return Finding(title, text, ok, {"slope": rise, "bytes": peaks}, headline=True)


def _statistics(context: Context, name: str, mask: masks.Mask) -> Iterator[Finding]:
    """Yield time and correctness of questions to the matrix of one head."""
    length = _LONG[context.level]
    query, key, value = _tensors(context, 1, length)
    matrix = sc.AttentionMatrix(query, key, mask)
    questions = {"entropy": matrix.entropy, "received": matrix.received, "top 8": lambda: matrix.topk(8)}
    with torch.no_grad():
        matrix @ value
        forward = context.device.seconds(lambda: matrix @ value)
        for question, ask in questions.items():
            ask()
            seconds = context.device.seconds(ask)
            text = f"{seconds:.3g} s, {seconds / forward:.1f} forward passes"
            figures = {"seconds": seconds, "forwards": seconds / forward}
            yield Finding(f"{question}, {name}, {length:,} tokens", text, None, figures, headline=True)
        yield _entropies(matrix, (query, key), mask, f"entropy by the definition, {name}")
        answers = matrix.compute(Entropy(), Received(), TopK(8))
        total, rows = float(answers[1].double().sum()), length
        ok = abs(total - rows) <= 1e-3 * rows
        yield Finding(f"received, {name}", f"adds up to {total:.1f} of {rows:,} rows", ok)


def _entropies(matrix: sc.AttentionMatrix, inputs: tuple[Tensor, Tensor], mask: masks.Mask, name: str) -> Finding:
    """Judge the entropies of some rows by float64."""
    query, key = (x[0, 0].double() for x in inputs)
    length = len(query)
    rows = torch.linspace(0, length - 1, _ROWS, device=query.device).long()
    index = torch.arange(length, device=query.device)
    scores = query[rows] @ key.mT * query.shape[1] ** -0.5
    scores = scores.masked_fill(~mask.allows(index[0], index[0], rows[:, None], index), -torch.inf)
    weights = scores.softmax(-1)
    expected = -(weights * weights.clamp_min(1e-300).log()).sum(-1)
    error = float((matrix.entropy()[0, 0, rows].double() - expected).abs().max())
    return Finding(name, f"{_ROWS} rows differ by at most {error:.1g}", error <= _ENTROPY_LIMIT, {"error": error})
