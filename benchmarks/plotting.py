"""Figures: growth of time and memory, and ratios with their targets."""

import io
import itertools
import re
import textwrap
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure

from saccade.viz.canvas import GREY, INK, INKS

_ROUND = [base * 10**power for power in range(-2, 6) for base in (1, 2, 5)]  # numbers worth a tick


class Curve(NamedTuple):
    """Measurements of a pattern at each size: seconds, and bytes beside its inputs."""

    times: list[float]
    extras: list[int]


def drawn(sizes: Sequence[int], curves: dict[str, Curve]) -> Figure:
    """Draw time and extra memory against length, on logarithmic axes.

    A curve whose name begins with SDPA, what torch does with all pairs, is black; it may end before the others.
    """
    figure = Figure(figsize=(8, 4.6), dpi=150, layout="constrained")
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
    return figure


def _dress(axes: Any, title: str, sizes: Sequence[int]) -> None:
    """Style two axes and write out their numbers."""
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
    """Draw how linear and quadratic time would grow from the fastest curve on, as far as there is room."""
    low, high = axes.get_ylim()
    for power, name in ((1, "∝ n"), (2, "∝ n²")):
        end = min(sizes[-1], sizes[0] * (0.8 * high / first) ** (1 / power))
        top = first * (end / sizes[0]) ** power
        axes.plot([sizes[0], end], [first, top], ":", color=GREY, linewidth=1, zorder=0)
        axes.annotate(name, (end, top), (4, -2), textcoords="offset points", size=9, color=GREY)
    axes.set_ylim(low, high)


def drawn_ratios(rows: Sequence[Mapping[str, Any]]) -> Figure:
    """Draw ratios as bars with their targets as lines, on a logarithmic axis, question by question."""
    lines: list[Mapping[str, Any] | str] = []
    for question, own in itertools.groupby(rows, key=lambda row: row["question"]):
        lines += [heading(question), *own]
    figure = Figure(figsize=(8, 0.8 + 0.19 * len(lines)), dpi=150, layout="constrained")
    axes = figure.subplots()
    for line, place in zip(lines, range(len(lines), 0, -1), strict=True):
        if not isinstance(line, str):
            _bar(axes, place, line)
    names = [line if isinstance(line, str) else label(line) for line in lines]
    axes.set_yticks(range(len(lines), 0, -1), names, size=7.5, color=INK)
    for line, tick in zip(lines, axes.get_yticklabels(), strict=True):
        tick.set_size(10 if isinstance(line, str) else 7.5)
    axes.set_xscale("log")
    axes.set_xlim(0.7, 250)
    axes.set_xticks((1, 2, 5, 10, 20, 50), ("1", "2", "5", "10", "20", "50"))
    axes.minorticks_off()
    axes.set_xlabel("times faster; line: target, grey: not asked on this machine", size=9, color=INK)
    axes.axvline(1.0, color=GREY, linewidth=0.8, zorder=0)
    axes.set_ylim(0.3, len(lines) + 0.8)
    axes.spines[["top", "right"]].set_visible(False)
    axes.tick_params("x", labelsize=8, length=2, color=INK, labelcolor=INK)
    axes.tick_params("y", length=0)
    return figure


def _bar(axes: Any, place: float, row: Mapping[str, Any]) -> None:
    """Draw the bar of one ratio with its target and its peer."""
    ratio, target = row["ratio"], row["target_ratio"]
    colour = INKS[1] if row["met"] is False else INKS[2] if row["met"] else "0.75"
    axes.barh(place, ratio, color=colour, height=0.7)
    axes.vlines(target, place - 0.42, place + 0.42, color="0", linewidth=1.4)
    style = {"textcoords": "offset points", "va": "center_baseline", "size": 7.5, "color": INK}
    axes.annotate(beside(row), (max(ratio, target), place), (4, 0), **style)


def heading(question: str) -> str:
    """Return the heading of a question: its title without the sizes."""
    return question.partition(", ")[0]


def label(row: Mapping[str, Any]) -> str:
    """Return the label of a bar, in two lines if one would be long."""
    return textwrap.fill(row["case"], 60)


def beside(row: Mapping[str, Any]) -> str:
    """Return the peer that a row names, as in "18.3x: 62.7 ms, sdpa+mask 1.13 s"."""
    found = re.match(r"(?:[\d.]+x: )?[\d.]+ \S+, (.+?) [\d.]+ (?:µs|ms|s)\b", row["measured"])
    return found[1] if found else ""


def png(figure: Figure) -> bytes:
    """Return the bytes of a figure."""
    image = io.BytesIO()
    FigureCanvasAgg(figure).print_png(image)
    return image.getvalue()
