"""Overlays: a map of weights drawn over the image it belongs to."""

from typing import TYPE_CHECKING

import numpy as np
import torch

from saccade.support.argument_hints import argument_hints
from saccade.support.errors import value_error
from saccade.support.validation import is_number
from saccade.viz.arrays import Array, as_numbers, limits_of
from saccade.viz.canvas import blank, whole_pixels

if TYPE_CHECKING:
    from matplotlib.colors import Colormap
    from matplotlib.figure import Figure

_LONGER = 3.2  # inches
_SHORTER = 0.5  # at least
_TINTS = ((1.0, 0.85, 0.3), (1.0, 0.7, 0.1), (0.97, 0.35, 0.05), (0.8, 0.0, 0.1))
_LUMINANCE = (0.299, 0.587, 0.114)  # weights of red, green and blue in perceived brightness


@argument_hints({})
def spatial_map(
    image: object,
    weights: object,
    *,
    title: str | None = None,
    opacity: float = 0.7,
    limits: tuple[float, float] | None = None,
) -> "Figure":
    """Draw a map of weights over the image it belongs to.

    The image is drawn in grey, so that colour shows only weight: where weights are low the image is unchanged, and
    where they are high it turns red. A map of a different size is resized smoothly to the image.

    Args:
        image: ``[H, W]``, ``[1, H, W]`` or ``[3, H, W]`` (red, green, blue): a tensor, an array or nested lists. Its
            smallest value is drawn black, its largest white.
        weights: ``[h, w]`` or ``[1, h, w]``, such as one item of `saccade.vision.SpatialAttention.weights`, or a row
            of an attention matrix over positions, reshaped to a map.
        title: text above the figure.
        opacity: opacity of the largest weight's colour: at 0 the image stays grey, at 1 the colour covers it.
        limits: the values at the two ends of the colour scale; computed from the weights if None.

    Returns:
        A figure outside pyplot, which is not shown automatically and need not be closed. `save` writes it.

    Raises:
        TypeError: the image or weights are not real numbers.
        ValueError: the wrong number of axes, values that are not finite, or an opacity outside [0, 1].
        ImportError: matplotlib is not installed.

    Cost: O(H * W + h * w).
    """
    grey = _grey(image)
    plane = _plane("weights", weights, (1,))
    if not is_number(opacity) or not 0 <= opacity <= 1:
        raise value_error("opacity", "be between 0 and 1", repr(opacity))
    low, high = limits_of(plane, limits)
    canvas = blank()
    height, width = (whole_pixels(max(side * _LONGER / max(grey.shape), _SHORTER)) for side in grey.shape)
    axes = canvas.axes
    axes.imshow(grey, cmap="gray", vmin=0, vmax=1, aspect="auto", interpolation="nearest")
    tinted = _resized(plane, grey.shape)
    overlay = axes.imshow(tinted, cmap=_tints(opacity), vmin=low, vmax=high, aspect="auto", interpolation="nearest")
    axes.set(xticks=[], yticks=[])
    axes.spines[:].set_visible(False)
    canvas.add_scale(overlay)
    return canvas.finished(width, height, title)


def _tints(opacity: float) -> "Colormap":
    """Return an overlay's colour map, from transparent to red, so that the image stays visible below it."""
    from matplotlib.colors import LinearSegmentedColormap  # noqa: PLC0415  matplotlib is optional

    steps = [(*rgb, share * opacity) for share, rgb in zip((0.0, 0.45, 0.8, 1.0), _TINTS, strict=True)]
    return LinearSegmentedColormap.from_list("saccade_tints", steps)


def _grey(image: object) -> Array:
    """Convert an overlay's image to grey, stretched to [0, 1]; an image of uniform brightness becomes mid-grey."""
    planes = _plane("image", image, (1, 3))
    low, high = float(planes.min()), float(planes.max())
    return (planes - low) / (high - low) if low < high else np.full_like(planes, 0.5)


def _plane(argument: str, values: object, channels: tuple[int, ...]) -> Array:
    """Check an overlay's image or map, and convert it to ``[H, W]``; three channels are reduced to their luminance."""
    array = as_numbers(argument, values)
    if array.ndim == 3 and array.shape[0] in channels:
        array = np.tensordot(np.array(_LUMINANCE, array.dtype), array, 1) if array.shape[0] == 3 else array[0]
    elif array.ndim != 2:
        rule = f"be [H, W]{''.join(f' or [{n}, H, W]' for n in channels)}"
        hint = (
            "channels come first: image.transpose(2, 0, 1)" if array.ndim == 3 and array.shape[2] in channels else None
        )
        raise value_error(argument, rule, f"shape {list(array.shape)}", hint=hint)
    if array.size == 0:
        raise value_error(argument, "have no empty axis", f"shape {list(array.shape)}")
    if not np.isfinite(array).all():
        raise value_error(argument, "be finite everywhere", "NaN or infinities")
    return array


def _resized(own: Array, shape: tuple[int, ...]) -> Array:
    if own.shape == shape:
        return own
    plane = torch.from_numpy(np.ascontiguousarray(own))[None, None]
    resized = torch.nn.functional.interpolate(plane, size=list(shape), mode="bilinear", antialias=True)
    return np.asarray(resized[0, 0].clamp(float(own.min()), float(own.max())))
