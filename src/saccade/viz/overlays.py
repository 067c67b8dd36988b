"""Overlays: a map of weights drawn over the image it belongs to."""

from typing import TYPE_CHECKING

import numpy as np
import torch

from saccade.support.argument_hints import argument_hints
from saccade.support.errors import value_error
from saccade.support.validation import is_number
from saccade.viz.arrays import Array, as_numbers, contrast_limits
from saccade.viz.blending import add_blended_scale, blend
from saccade.viz.canvas import blank, whole_pixels

if TYPE_CHECKING:
    from matplotlib.figure import Figure

_LONGER = 3.2  # inches: length of the longer side
_SHORTER = 0.5  # inches: minimum length of the shorter side
_GAP = 0.05  # distance between an image and its map, as a share of its width
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

    Below the weights, the image is drawn in grey, so that colour shows only weight: where weights are low, the grey
    image is unchanged, and where they are high, it turns red; weights below 0 are blue. An image with colours is also
    drawn unchanged, to the left. The bar shows weight from bottom to top and the image's brightness from left to right,
    so it contains every colour of the map. A map of a different size is resized smoothly to the image. If the smallest
    weight is above half of the largest, the scale starts at the smallest weight instead of 0.

    Args:
        image: ``[H, W]``, ``[1, H, W]`` or ``[3, H, W]`` (red, green, blue): a tensor, an array or nested lists. Its
            smallest value is drawn dark grey, its largest white.
        weights: ``[h, w]`` or ``[1, h, w]``, such as one item of `saccade.vision.SpatialAttention.weights`, or a row
            of an attention matrix over positions, reshaped to a map.
        title: text above the figure.
        opacity: opacity of the largest weight's colour: at 0 the image stays grey, at 1 the colour covers it.
        limits: the values at the two ends of the colour scale; computed from the weights if None. For gates of a
            sigmoid, which are not distributions, ``(0, 1)`` shows the full scale.

    Returns:
        A figure that pyplot does not manage: it is not shown automatically and need not be closed. `save` writes it.

    Raises:
        TypeError: the image or weights are not real numbers.
        ValueError: the number of axes is wrong, a value is not finite, or the opacity is outside [0, 1].
        ImportError: matplotlib is not installed.

    Cost: O(H * W + h * w).
    """
    grey = as_grey(image)
    plane = as_plane("weights", weights, (1,))
    if not is_number(opacity) or not 0 <= opacity <= 1:
        raise value_error("opacity", "be between 0 and 1", repr(opacity))
    ends = contrast_limits(plane, limits)
    canvas = blank()
    pixels = blend(grey, resized(plane, grey.shape), ends, opacity)
    height, width = (whole_pixels(max(side * _LONGER / max(grey.shape), _SHORTER)) for side in grey.shape)
    unchanged = as_colours(image)
    if (unchanged != unchanged[..., :1]).any():
        gap = np.ones((len(grey), max(1, round(_GAP * grey.shape[1])), 3))
        pixels = np.concatenate([unchanged, gap, pixels], axis=1)
        width = whole_pixels(width * pixels.shape[1] / grey.shape[1])
    axes = canvas.axes
    axes.imshow(pixels, aspect="auto", interpolation="antialiased")
    axes.set(xticks=[], yticks=[])
    axes.spines[:].set_visible(False)
    add_blended_scale(canvas, grey, ends, opacity)
    return canvas.finished(width, height, title)


def as_grey(image: object) -> Array:
    """Convert an overlay's image to grey, stretched to [0, 1]; an image of uniform brightness becomes mid-grey."""
    planes = as_plane("image", image, (1, 3))
    low, high = float(planes.min()), float(planes.max())
    return (planes - low) / (high - low) if low < high else np.full_like(planes, 0.5)


def as_colours(image: object) -> Array:
    """Return an image's colours for an overlay, ``[H, W, 3]``, from 0 to 1; a grey image has three equal channels."""
    array = as_numbers("image", image)
    if array.ndim == 3 and array.shape[0] == 3:
        low, high = float(array.min()), float(array.max())
        return np.moveaxis((array - low) / (high - low) if low < high else np.full_like(array, 0.5), 0, -1)
    return np.repeat(as_grey(image)[..., None], 3, axis=-1)


def as_plane(argument: str, values: object, channels: tuple[int, ...]) -> Array:
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


def resized(plane: Array, shape: tuple[int, ...]) -> Array:
    """Resize an overlay's image or map smoothly, within the range of its values."""
    if plane.shape == shape:
        return plane
    tensor = torch.from_numpy(np.ascontiguousarray(plane))[None, None]
    smooth = torch.nn.functional.interpolate(tensor, size=list(shape), mode="bilinear", antialias=True)
    return np.asarray(smooth[0, 0].clamp(float(plane.min()), float(plane.max())))
