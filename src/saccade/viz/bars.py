"""Draw the weights of channels as bars."""

from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np

from saccade.support.argument_hints import argument_hints
from saccade.support.errors import value_error
from saccade.viz.arrays import as_matrix, as_numbers, limits_of, max_pool
from saccade.viz.canvas import DPI, blank, colours, dress, whole_pixels
from saccade.viz.ticks import check_labels, name_columns

if TYPE_CHECKING:
    from matplotlib.figure import Figure

_BAR, _NARROWEST, _WIDEST, _HEIGHT = 0.16, 2.4, 9.0, 1.5  # inches: one bar, and the picture
_GATE = (0.0, 1.0)


@argument_hints({})
def channel_weights(
    weights: object,
    *,
    x_labels: Sequence[str] | None = None,
    title: str | None = None,
    x_name: str = "channel",
    limits: tuple[float, float] | None = None,
) -> "Figure":
    """Draw one weight per channel as bars, in the channels' order.

    The height and the colour of a bar say the same. With more channels than fit, a bar is the largest of a group of
    neighbours; the axis still counts channels. A weight that is not finite has no bar.

    Args:
        weights: ``[channels]``: a tensor of any dtype and device, an array or a list, such as one row of
            `saccade.vision.ChannelAttention.weights`.
        x_labels: one per channel, shown as text, never as mathematics; numbers from 0 when None.
        title: text above the figure.
        x_name: what the bars are.
        limits: the values at the axis's ends; 0 to 1 when all weights lie between, else from the weights.

    Returns:
        A figure outside pyplot: it is neither shown nor to be closed. `save` writes it.

    Raises:
        TypeError: ``weights`` are not real numbers, or labels are one string.
        ValueError: not one axis, nothing finite, or labels of another length.
        ImportError: matplotlib is not installed.

    Cost: O(channels).
    """
    row = as_numbers("weights", weights)
    if row.ndim != 1:
        hint = "gates[0] are those of the first picture" if row.ndim == 2 else None
        raise value_error("weights", "be [channels]", f"shape {list(row.shape)}", hint=hint)
    row = as_matrix(row[None])
    channels = row.shape[1]
    check_labels("x_labels", x_labels, channels, "channels")
    if limits is None and np.nanmin(row) >= 0 and np.nanmax(row) <= 1:
        limits = _GATE
    low, high = limits_of(row, limits)
    canvas = blank()
    width = whole_pixels(float(np.clip(channels * _BAR, _NARROWEST, _WIDEST)))
    # At least two pixels a bar, so that neighbours do not share one.
    shown = max_pool(row, 1, int(width * DPI / 2))[0]
    step = channels / len(shown)
    centres = (np.arange(len(shown)) + 0.5) * step - 0.5
    share = np.nan_to_num((shown - low) / (high - low)).clip(0, 1)
    axes = canvas.axes
    base = min(max(0.0, low), high)
    gap = 0.8 if width * DPI / len(shown) > 6 else 1.0
    axes.bar(centres, shown - base, bottom=base, width=gap * step, color=colours()(0.25 + 0.65 * share))
    axes.set(xlim=(-0.5, channels - 0.5), ylim=(low, high))
    dress(axes)
    name_columns(axes, x_labels, x_name, channels, width)
    return canvas.finished(width, _HEIGHT, title)
