"""Pictures: how time and memory grow, and ratios beside their targets."""

import io
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure

from saccade.viz.canvas import GREY, INK, INKS

_ROUND = [base * 10**power for power in range(-2, 6) for base in (1, 2, 5)]  # numbers worth a tick


class Curve(NamedTuple):
    """What a pattern took at each of the sizes: seconds, and bytes beside its inputs."""

    times: list[float]
    extras: list[int]


def drawn(sizes: Sequence[int], curves: dict[str, Curve]) -> bytes:
    """Time and extra memory against length, on logarithmic axes: a PNG.

    A curve whose name begins with SDPA, what torch does with all pairs, is black; it may end before the others.
    """
    figure = Figure(figsize=(8, 4.6), dpi=150, layout="constrained")
    canvas = FigureCanvasAgg(figure)
    left, right = figure.subplots(1, 2)
    inks = iter(INKS * (1 + len(curves) // len(INKS)))
    for name, curve in curves.items():
        is_dense = name.startswith("SDPA")
        style = {"color": INK if is_dense else next(inks), "linestyle": "--" if is_dense else "-"}
        style |= {"marker": "s" if is_dense else "o", "markersize": 4, "linewidth": 1.6, "label": name}
        left.loglog(sizes[: len(curve.times)], [1e3 * time for time in curve.times], **style)
        right.loglog(sizes[: len(curve.extras)], [extra / 2**20 for extra in curve.extras], **style)
    for axes, title in ((left, "forward pass, ms"), (right, "memory beside inputs, MiB")):
        _dress(axes, title, sizes)
    _guide(left, sizes, 1e3 * min(curve.times[0] for curve in curves.values()))
    figure.legend(*left.get_legend_handles_labels(), loc="outside lower center", ncols=3, fontsize=9, frameon=False)
    return _png(canvas)


def _dress(axes: Any, title: str, sizes: Sequence[int]) -> None:
    """Two axes in ink, the numbers that are there written out."""
    axes.set_title(title, loc="left", size=11, color=INK)
    axes.set_xlabel("tokens", color=INK)
    axes.set_xticks(sizes, [f"{n // 1024} k" for n in sizes])
    low, high = axes.get_ylim()
    axes.set_yticks(*zip(*((y, f"{y:g}") for y in _ROUND if low <= y <= high), strict=True))
    axes.set_ylim(low, high)
    axes.minorticks_off()
    axes.grid(alpha=0.3)
    axes.spines[["top", "right"]].set_visible(False)
    axes.tick_params(color=INK, labelcolor=INK)


def _guide(axes: Any, sizes: Sequence[int], first: float) -> None:
    """How linear and quadratic time would grow from the fastest curve on, as far as there is room."""
    low, high = axes.get_ylim()
    for power, name in ((1, "∝ n"), (2, "∝ n²")):
        end = min(sizes[-1], sizes[0] * (0.8 * high / first) ** (1 / power))
        top = first * (end / sizes[0]) ** power
        axes.plot([sizes[0], end], [first, top], ":", color=GREY, linewidth=1, zorder=0)
        axes.annotate(name, (end, top), (4, -2), textcoords="offset points", size=9, color=GREY)
    axes.set_ylim(low, high)


def drawn_ratios(rows: Sequence[Mapping[str, Any]]) -> bytes:
    """Ratios as bars, their targets as lines across them, on a logarithmic axis: a PNG."""
    figure = Figure(figsize=(10, 1.0 + 0.24 * len(rows)), dpi=120, layout="constrained")
    canvas = FigureCanvasAgg(figure)
    axes = figure.subplots()
    places = range(len(rows), 0, -1)
    colours = [INKS[1] if row["met"] is False else INKS[2] if row["met"] else "0.75" for row in rows]
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
