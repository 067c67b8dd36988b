"""Masks for text followed by the cells of an image, as in DALL-E: a cell sees its row, column or neighbourhood."""

from __future__ import annotations

from saccade.masks.grid.axial import Axial
from saccade.masks.grid.neighborhood import Neighborhood, radii_of
from saccade.masks.mask import Mask
from saccade.masks.mask_fields import SIZE_BITS
from saccade.masks.rules.causal import Causal
from saccade.masks.rules.prefix import Prefix
from saccade.support.argument_hints import argument_hints
from saccade.support.validation import check_int


@argument_hints()
def image_rows(text_len: int, height: int, width: int) -> Mask:
    """Return the mask for text followed by an image, in which a cell sees the text and its row up to itself.

    >>> print(image_rows(2, 2, 3).picture(8))
    1 . . . . . . .
    1 1 . . . . . .
    1 1 1 . . . . .
    1 1 1 1 . . . .
    1 1 1 1 1 . . .
    1 1 . . . 1 . .
    1 1 . . . 1 1 .
    1 1 . . . 1 1 1

    The cells of the image are ordered row by row. Tokens after the image see only the text. Without text, attention
    over these tokens raises an error. In the paper a cell also sees the previous row from the cell above it onwards:
    ``Causal() & (Prefix(n) | Window(width, 0).after(n))``.

    Args:
        text_len: number of positions before the first cell, at least 0.
        height, width: rows and columns of the image, ints of at least 1.

    Cost: at most ``text_len + width`` keys per query.

    Reference: Ramesh et al. 2021, arXiv:2102.12092, appendix B.1 and figure 11.
    """
    _check_image(text_len, height, width)
    return _after_text(text_len, Axial(height, width, "rows"))


@argument_hints()
def image_columns(text_len: int, height: int, width: int) -> Mask:
    """Return the mask for text followed by an image, in which a cell sees the text and its column up to itself.

    >>> print(image_columns(2, 2, 3).picture(8))
    1 . . . . . . .
    1 1 . . . . . .
    1 1 1 . . . . .
    1 1 . 1 . . . .
    1 1 . . 1 . . .
    1 1 1 . . 1 . .
    1 1 . 1 . . 1 .
    1 1 . . 1 . . 1

    Args:
        text_len, height, width: see `image_rows`.

    Cost: at most ``text_len + height`` keys per query; columns are processed as views of every width-th row and key.

    Reference: Ramesh et al. 2021, arXiv:2102.12092, appendix B.1 and figure 11.
    """
    _check_image(text_len, height, width)
    return _after_text(text_len, Axial(height, width, "columns"))


@argument_hints()
def image_neighbors(text_len: int, height: int, width: int, radius: int | tuple[int, int]) -> Mask:
    """Return the mask for text followed by an image, in which a cell sees the text and nearby cells up to itself.

    >>> print(image_neighbors(2, 2, 3, 1).picture(8))
    1 . . . . . . .
    1 1 . . . . . .
    1 1 1 . . . . .
    1 1 1 1 . . . .
    1 1 . 1 1 . . .
    1 1 1 1 . 1 . .
    1 1 1 1 1 1 1 .
    1 1 . 1 1 . 1 1

    Args:
        text_len, height, width: see `image_rows`.
        radius: number of visible rows above, and of columns on either side; see `Neighborhood`. The paper's kernel of
            11 x 11 cells corresponds to a radius of 5, but it continues across the ends of rows.

    Cost: about ``text_len + 2 * radius ** 2`` keys per query, plus masked keys in the same tiles.

    Reference: Ramesh et al. 2021, arXiv:2102.12092, appendix B.1 and figure 11.
    """
    _check_image(text_len, height, width)
    return _after_text(text_len, Neighborhood(height, width, radii_of(radius)))


def _check_image(text_len: int, height: int, width: int) -> None:
    check_int("text_len", text_len, 0, below=1 << SIZE_BITS)
    check_int("height", height, below=1 << SIZE_BITS)
    check_int("width", width, below=1 << SIZE_BITS)


def _after_text(text_len: int, mask: Mask) -> Mask:
    """Return the causal mask for text followed by image cells. All tokens see the text, and cells use ``mask``."""
    return Causal() & (Prefix(text_len) | mask.after(text_len)) if text_len else Causal() & mask
