"""Blend weights with an image, and draw a colour scale that shows every blended colour."""

from typing import TYPE_CHECKING

import numpy as np

from saccade.viz.arrays import Array
from saccade.viz.canvas import INK, Canvas
from saccade.viz.ticks import WEIGHT, name_axis

if TYPE_CHECKING:
    from matplotlib.axes import Axes

# Colours from the smallest to the largest absolute weight, and the share of the full opacity at each.
_WARM = np.array([(1.0, 0.85, 0.3), (1.0, 0.7, 0.1), (0.97, 0.35, 0.05), (0.8, 0.0, 0.1)])
_COLD = np.array([(0.5, 0.8, 0.95), (0.3, 0.65, 0.9), (0.1, 0.4, 0.8), (0.05, 0.1, 0.55)])
_SHARES = np.array((0.0, 0.45, 0.8, 1.0))
_STEPS = np.linspace(0.0, 1.0, 4)
_DARKEST = 0.3  # the darkest grey of an image, so that colours stay visible on it
_BAR_CELLS = (256, 48)
_BAR = 0.26  # inches


def blend(grey: Array, weights: Array, limits: tuple[float, float], opacity: float) -> Array:
    """Return an image overlaid with the colours of weights, ``[..., 3]``.

    Args:
        grey: the image, from 0 to 1, broadcastable to the weights.
        weights: the weights; negative weights get cold colours, all others warm colours.
        limits: the values at the two ends of the scale; see `saccade.viz.arrays.contrast_limits`.
        opacity: opacity of the strongest colour.
    """
    low, high = limits
    share = (weights / high if low < 0 else (weights - low) / (high - low)).clip(-1.0 if low < 0 else 0.0, 1.0)
    size = np.abs(share)
    warm, cold = (np.stack([np.interp(size, _STEPS, channel) for channel in ink.T], -1) for ink in (_WARM, _COLD))
    alpha = (opacity * np.interp(size, _STEPS, _SHARES))[..., None]
    base = (_DARKEST + (1.0 - _DARKEST) * grey)[..., None]
    return np.asarray((1.0 - alpha) * base + alpha * np.where((share < 0)[..., None], cold, warm))


def add_blended_scale(canvas: Canvas, grey: Array, limits: tuple[float, float], opacity: float) -> "Axes":
    """Draw the scale of a blended image next to it, with weights from bottom to top and brightness from left to right.

    The scale blends each weight with every brightness of the image, so it contains every colour of the image.
    """
    low, high = limits
    rows, columns = _BAR_CELLS
    weights, base = np.meshgrid(
        np.linspace(low, high, rows), np.linspace(float(grey.min()), float(grey.max()), columns), indexing="ij"
    )
    scale = canvas.add_scale_axes(_BAR)
    scale.imshow(
        blend(base, weights, limits, opacity),
        extent=(0.0, 1.0, low, high),
        origin="lower",
        aspect="auto",
        interpolation="nearest",
    )
    scale.set(xticks=[])
    scale.yaxis.tick_right()
    scale.yaxis.set_label_position("right")
    name_axis(scale.yaxis, WEIGHT)
    name_axis(scale.xaxis, "brightness")
    scale.spines[:].set_visible(False)
    scale.tick_params(labelsize=8, length=2, color=INK, labelcolor=INK)
    return scale
