"""Pictures: how time and memory grow, and ratios beside their targets."""

import io
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure


class Curve(NamedTuple):
    """What a pattern took at each of the sizes: seconds, and bytes beside its inputs."""

    times: list[float]
    extras: list[int]


def drawn(sizes: Sequence[int], curves: dict[str, Curve]) -> bytes:
    """Time and extra memory against length, on logarithmic axes: a PNG."""
    figure = Figure(figsize=(10, 4.2), dpi=120, layout="constrained")
    canvas = FigureCanvasAgg(figure)
    left, right = figure.subplots(1, 2)
    for name, curve in curves.items():
        left.loglog(sizes, [1e3 * time for time in curve.times], marker="o", label=name)
        right.loglog(sizes, [extra / 2**20 for extra in curve.extras], marker="o", label=name)
    first = min(curve.times[0] for curve in curves.values())
    for power, style in ((1, ":"), (2, "--")):
        guide = [1e3 * first * (n / sizes[0]) ** power for n in sizes]
        left.loglog(sizes, guide, style, color="0.6", label=f"slope {power}", zorder=0)
    for axes, title in ((left, "forward pass, ms"), (right, "extra memory, MiB")):
        axes.set_title(title)
        axes.set_xlabel("tokens")
        axes.set_xticks(sizes, [f"{n // 1024} k" for n in sizes])
        axes.minorticks_off()
        axes.grid(alpha=0.3)
    left.legend(fontsize=8)
    return _png(canvas)


def drawn_ratios(rows: Sequence[Mapping[str, Any]]) -> bytes:
    """Ratios as bars, their targets as lines across them, on a logarithmic axis: a PNG."""
    figure = Figure(figsize=(10, 1.0 + 0.24 * len(rows)), dpi=120, layout="constrained")
    canvas = FigureCanvasAgg(figure)
    axes = figure.subplots()
    places = range(len(rows), 0, -1)
    colours = ["tab:red" if row["met"] is False else "tab:blue" if row["met"] else "0.7" for row in rows]
    axes.barh(places, [row["ratio"] for row in rows], color=colours, height=0.7)
    axes.vlines(
        [row["target_ratio"] for row in rows], [y - 0.45 for y in places], [y + 0.45 for y in places], color="0"
    )
    axes.set_yticks(places, [f"{row['question'].partition(',')[0]}: {row['case']}"[:70] for row in rows], fontsize=7)
    axes.set_xscale("log")
    axes.set_xticks((1, 2, 5, 10, 20, 50, 100), ("1", "2", "5", "10", "20", "50", "100"))
    axes.set_xlabel("times faster; line: target, grey: not asked on this machine")
    axes.axvline(1.0, color="0.4", linewidth=0.8)
    axes.set_ylim(0.3, len(rows) + 0.7)
    return _png(canvas)


def _png(canvas: FigureCanvasAgg) -> bytes:
    image = io.BytesIO()
    canvas.print_png(image)
    return image.getvalue()
