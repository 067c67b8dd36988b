"""ImageBidirectional: a mask in which the tokens of an image see each other."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np
from torch import Tensor

from saccade.masks.mask_fields import POSITION_BITS, items_of
from saccade.masks.rules.range_table import RangeTable
from saccade.support.argument_hints import argument_hints
from saccade.support.errors import shown, value_error
from saccade.support.validation import are_integers

_RULE = "be an int per position: the number of its image, or -1 for text"


@argument_hints(groups="ImageBidirectional([-1, 0, 0, -1]): the number of the image of each token, or -1 for text")
@dataclasses.dataclass(frozen=True)
class ImageBidirectional(RangeTable):
    """A mask in which each token of an image sees all tokens of the same image; text tokens see nothing.

    Join it with the mask of the text: ``Causal() | ImageBidirectional(groups)`` is the mask of Gemma 3's layers with
    full attention, and ``sliding_window(n) | ImageBidirectional(groups)`` the mask of its other layers.

    >>> from saccade.masks import Causal
    >>> print((Causal() | ImageBidirectional([-1, 0, 0, 0, -1, 1, 1])).picture(7))
    1 . . . . . .
    1 1 1 1 . . .
    1 1 1 1 . . .
    1 1 1 1 . . .
    1 1 1 1 1 . .
    1 1 1 1 1 1 1
    1 1 1 1 1 1 1

    Args:
        groups: for each position, the number of its image, or -1 for text: ints ``[len]`` for all batch items, or
            ``[batch, len]``. The tokens of an image are consecutive; an image cannot continue after other tokens.
            Adjacent images need different numbers.

    Raises:
        ValueError: the numbers are not ints of at least -1, there are none, or an image is not contiguous.
        TypeError: ``groups`` is not a list or tensor.

    Reference: Gemma Team 2025, arXiv:2503.19786; ``token_type_ids`` in transformers marks the tokens of images.
    """

    groups: tuple[tuple[int, ...], ...]
    is_fact_of_batch = True

    def __init__(self, groups: Sequence[int] | Sequence[Sequence[int]] | Tensor):
        values = items_of("groups", groups, _RULE)
        rows = values if values and isinstance(values[0], Iterable) else [values]
        items = tuple(_image_numbers(row) for row in rows)
        object.__setattr__(self, "groups", items)
        starts, ends = zip(*map(_spans_of_images, items), strict=True)
        self._set_ranges(starts, ends)


def _image_numbers(row: object) -> tuple[int, ...]:
    numbers = items_of("groups", row, _RULE)
    if not numbers or not (are_integers(numbers) and min(numbers) >= -1 and max(numbers) < 1 << POSITION_BITS):
        raise value_error("groups", _RULE, shown(row))
    return tuple(map(int, numbers))


def _spans_of_images(numbers: tuple[int, ...]) -> tuple[Any, Any]:
    """Return, for each position, the start and end of its image, int64 ``[len, 1]`` each; equal for text."""
    groups = np.asarray(numbers, dtype=np.int64)
    edges = np.flatnonzero(np.diff(groups, prepend=-2, append=-2))
    firsts, sizes = edges[:-1], np.diff(edges)
    images = groups[firsts]
    images = images[images >= 0]
    values, counts = np.unique(images, return_counts=True)
    if (counts > 1).any():
        number = int(values[counts.argmax()])
        hint = "the tokens of an image are consecutive; give another image a different number"
        raise value_error("groups", "have the tokens of each image in one run", f"image {number} twice", hint=hint)
    starts = np.repeat(firsts, sizes)
    ends = np.where(groups < 0, starts, starts + np.repeat(sizes, sizes))
    return starts[:, None], ends[:, None]
