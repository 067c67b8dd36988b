"""The picture of how time and memory grow."""

import io
from collections.abc import Sequence
from typing import NamedTuple

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
    image = io.BytesIO()
    canvas.print_png(image)
    return image.getvalue()
