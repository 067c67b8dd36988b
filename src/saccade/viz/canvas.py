"""Canvas: a figure that fits itself around a map of fixed size and the text next to it."""

import os
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from saccade.support.argument_hints import argument_hints
from saccade.support.errors import missing_extra, value_error
from saccade.support.language import translated
from saccade.support.validation import check_int
from saccade.viz.arrays import Array
from saccade.viz.fonts import drawable_title
from saccade.viz.titles import wrapped

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.colors import Colormap
    from matplotlib.figure import Figure
    from matplotlib.image import AxesImage

DPI = 150
HIDDEN = "#c9d1d3"  # colour of cells without a finite number: a grey that is not in the colour scale
INK, GREY = "#2b2b33", "#8a8f98"
# Colours of lines, which differ in lightness as well as hue so that they are distinguishable in grey.
INKS = ("#3b0f70", "#de4968", "#0f7a8a", "#c08a1e", "#fe9f6d", "#8c5fb0", "#5a6b2f", "#8a8a99")
PLAIN: dict[str, Any] = {
    "color": INK,
    "parse_math": False,
    "usetex": False,
}  # `$` and `\` in labels have no special meaning
_MARGIN = 21 / DPI  # inches
_TITLE_SIZE, _SUBTITLE_SIZE = 11.0, 8.5  # points
_UNDER_TITLE = 5.0  # points between a title and its subtitle
_SCALE, _BESIDE = 0.13, 0.14  # inches: width of a colour scale, and its distance from the map


@dataclass(frozen=True)
class Canvas:
    """A white figure with one pair of axes; the figure's size is set after everything around the map has been drawn.

    Attributes:
        figure, axes: the figure and the axes of its map.
        scale_widths: widths of the scales next to the map, in inches.
    """

    figure: "Figure"
    axes: "Axes"
    scale_widths: list[float] = field(default_factory=list)

    def write(self, x: float, y: float, text: str, **style: Any) -> None:
        """Write ``text`` at ``(x, y)`` in data coordinates of the map; dollar signs do not start math mode."""
        shown, families = drawable_title(text)
        self.axes.text(x, y, shown, family=families, **PLAIN, **style)

    def show_pixels(self, pixels: Array, title: str | None, subtitle: str | None = None) -> "Figure":
        """Draw an image ``[height, width, 3]`` on the canvas pixel by pixel, without axes; return the figure."""
        height, width, _ = pixels.shape
        self.axes.imshow(pixels, interpolation="nearest", aspect="auto", extent=(0, width, height, 0))
        self.axes.set_axis_off()
        return self.finished(width / DPI, height / DPI, title, subtitle)

    def finished(
        self,
        width: float,
        height: float,
        title: str | None,
        subtitle: str | None = None,
        *,
        title_width: float | None = None,
    ) -> "Figure":
        """Fit the canvas around a map of ``width`` x ``height`` inches and the text next to it; return the figure.

        The title, and the smaller subtitle below it, are wrapped to the width of the map, or to ``title_width`` inches;
        existing line breaks are kept.
        """
        self._write_titles(title, subtitle, width if title_width is None else title_width)
        left = bottom = right = top = 1.0
        # Measure twice, because ticks may move when the axes are resized.
        for _ in range(2):
            self._place((left, bottom, width, height), (left + width + right, bottom + height + top))
            drawn = self.figure.get_tightbbox()
            right += whole_pixels(drawn.x1) - (left + width + right) + _MARGIN
            top += whole_pixels(drawn.y1) - (bottom + height + top) + _MARGIN
            left -= whole_pixels(drawn.x0) - _MARGIN
            bottom -= whole_pixels(drawn.y0) - _MARGIN
        self._place((left, bottom, width, height), (left + width + right, bottom + height + top))
        return self.figure

    def _write_titles(self, title: str | None, subtitle: str | None, width: float) -> None:
        """Write a title and a subtitle above the map; either may be missing."""
        below = None if subtitle is None else _wrapped_text(subtitle, width, _SUBTITLE_SIZE)
        if not title:
            if below is not None:
                self.axes.set_title(below[0], loc="left", size=_SUBTITLE_SIZE, family=below[1], pad=10, **PLAIN)
            return
        shown, families = _wrapped_text(title, width, _TITLE_SIZE)
        room = 0.0 if below is None else _UNDER_TITLE + 1.2 * _SUBTITLE_SIZE * (below[0].count("\n") + 1)
        heading = self.axes.set_title(shown, loc="left", size=_TITLE_SIZE, family=families, pad=10 + room, **PLAIN)
        if below is not None:
            where: dict[str, Any] = {"xycoords": heading, "textcoords": "offset points", "va": "top"}
            self.axes.annotate(
                below[0], (0, 0), (0, -_UNDER_TITLE), size=_SUBTITLE_SIZE, family=below[1], **where, **PLAIN
            )

    def add_scale(self, image: "AxesImage", most: float | None = None) -> "Axes":
        """Draw the colour scale of ``image`` to the right of the map, with an arrow if some values exceed it.

        Return the axes of the scale.
        """
        scale = self.add_scale_axes(_SCALE)
        above = "neither" if most is None else "max"
        bar = self.figure.colorbar(image, cax=scale, extend=above, extendfrac=0.04)
        bar.outline.set_visible(False)
        if scale.get_yscale() == "log":
            bar.ax.yaxis.set_major_formatter(lambda x, _: f"{x:g}")
        scale.tick_params(labelsize=8, length=2, color=INK, labelcolor=INK)
        if most is not None:
            shown, families = drawable_title(translated("up to {most}", most=f"{most:.2g}"))
            scale.set_title(shown, size=8, color=INK, pad=4, loc="left", family=families)
        return scale

    def add_scale_axes(self, width: float) -> "Axes":
        """Add empty axes for a scale, ``width`` inches wide and as high as the map, to the right of the map."""
        self.scale_widths.append(width)
        return self.figure.add_axes((0.0, 0.0, 1.0, 1.0))

    def _place(self, frame: tuple[float, float, float, float], size: tuple[float, float]) -> None:
        (left, bottom, width, height), (across, up) = frame, size
        self.figure.set_size_inches(across, up)
        self.axes.set_position((left / across, bottom / up, width / across, height / up))
        for scale, scale_width in zip(self.figure.axes[1:], self.scale_widths, strict=True):
            scale.set_position(((left + width + _BESIDE) / across, bottom / up, scale_width / across, height / up))


def _wrapped_text(text: str, width: float, size: float) -> tuple[str, list[str]]:
    """Wrap a title to ``width`` inches at font size ``size``; return its text and the font families to draw it with."""
    lines = wrapped(text, max(int(width * 72 / (0.55 * size)), 40))
    families = drawable_title(" ".join(text.splitlines()))[1]
    return "\n".join(drawable_title(line)[0] for line in lines), families


def colours(*, signed: bool = False) -> "Colormap":
    """Return the colour map of all figures: white for 0, then reversed magma, with evenly decreasing lightness.

    The order of the colours is preserved in greyscale. With ``signed``, white is in the middle of the scale, and values
    below 0 are blue, darker the farther they are from 0.
    """
    from matplotlib import colormaps  # noqa: PLC0415  matplotlib is optional
    from matplotlib.colors import LinearSegmentedColormap  # noqa: PLC0415

    steps = [(1.0, 1.0, 1.0), *colormaps["magma_r"](np.linspace(0, 0.96, 9))[1:, :3]]
    if signed:
        steps = [*colormaps["GnBu_r"](np.linspace(0, 0.9, 9))[:-1, :3], *steps]
    return LinearSegmentedColormap.from_list("saccade", steps).with_extremes(bad=HIDDEN)


def whole_pixels(inches: float) -> float:
    """Round a length on the canvas, in inches, to a whole number of pixels."""
    return round(inches * DPI) / DPI


def blank() -> Canvas:
    """Return an empty canvas for a figure; it is not registered with pyplot, but notebooks display it.

    Raises:
        ImportError: matplotlib is not installed.
    """
    try:
        from matplotlib.backends.backend_agg import FigureCanvasAgg  # noqa: PLC0415  imported when used

        from saccade.viz.notebook_figure import Figure  # noqa: PLC0415
    except ModuleNotFoundError:
        raise missing_extra("matplotlib", "viz") from None
    figure = Figure(dpi=DPI, facecolor="white")
    FigureCanvasAgg(figure)
    return Canvas(figure, figure.add_axes((0.0, 0.0, 1.0, 1.0)))


def dress(axes: "Axes") -> None:
    """Style the axes of a figure: dark left and bottom spines without a frame, and small tick labels."""
    axes.spines[["top", "right"]].set_visible(False)
    axes.spines[["left", "bottom"]].set_color(INK)
    axes.tick_params(labelsize=8, length=2, color=INK, labelcolor=INK)


@argument_hints({})
def save(figure: "Figure", path: str | os.PathLike[str], *, width: int | None = None) -> Path:
    """Write ``figure`` to ``path``, in the format of the path's suffix (``.png``, ``.svg``, ``.pdf``).

    The file is written under a temporary name and then renamed, so that a reader never sees a partial file.

    Args:
        figure: a figure of this module, or any figure of matplotlib.
        path: the file.
        width: width of a PNG file in pixels, such as 1920 for a slide; lines and letters grow with it. By default,
            matplotlib's configured resolution determines the width. SVG and PDF files have no pixels.

    Returns:
        The path of the file.

    Raises:
        ValueError: matplotlib does not support the format, or ``width`` is given for a format other than PNG.
        OSError: the folder does not exist or is not writable.
    """
    destination = Path(path)
    temporary = destination.with_name(f".{destination.name}.{os.getpid()}.part")
    formats = figure.canvas.get_supported_filetypes()
    suffix = destination.suffix.removeprefix(".").lower() or "png"
    if suffix not in formats:
        raise value_error("path", f"end in one of {', '.join(sorted(formats))}", path)
    dpi: float | None = None
    if width is not None:
        if suffix != "png":
            raise value_error("width", "be left out unless path ends in .png", width)
        dpi = check_int("width", width, 16, below=1 << 16) / figure.get_figwidth()
    try:
        figure.savefig(temporary, format=suffix, dpi=dpi)
        os.replace(temporary, destination)
    finally:
        temporary.unlink(missing_ok=True)
    return destination
