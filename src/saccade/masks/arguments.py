"""What masks are made from, checked: lists of whole numbers, tensors that are read, lengths and positions."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Set
from typing import Any

import numpy as np
import torch
from torch import Tensor

from saccade.arguments import integer, is_integer
from saccade.errors import hidden_by_vmap, kind, shown, type_error, value_error
from saccade.transforms import is_mapped

__all__ = [
    "POSITION_BITS",
    "SIZE_BITS",
    "check_field",
    "check_positions",
    "check_readable",
    "items_of",
    "length_of",
    "positions_of",
    "ints_of",
    "size_of",
    "without_list",
]

POSITION_BITS = 62
"""Positions, and lengths that are added to them, stay below two to this power: their sums must fit int64."""
SIZE_BITS = 40
"""Sizes that are multiplied by a number of blocks or rows stay below two to this power, for the same reason."""


def check_field(mask: object, name: str, least: int, *, bits: int = POSITION_BITS) -> None:
    """Make a field of a frozen mask an int, of at least ``least`` and below ``2 ** bits``; NumPy's become Python's.

    Raises:
        ValueError: anything else.
    """
    value = integer(type(mask).__name__, name, getattr(mask, name), least, below=1 << bits)
    object.__setattr__(mask, name, value)


def items_of(
    where: str, name: str, given: object, rule: str, *, is_ordered: bool = True, hint: str | None = None
) -> list[Any]:
    """The items of a list, a tensor, an array or another iterable, which are yet to be checked.

    Args:
        where, name, rule, hint: for the error message.
        given: what was handed over.
        is_ordered: the order matters, so that a set will not do.

    Raises:
        TypeError: nothing that can be gone through; text and mappings, whose items are not what is meant.
        ValueError: a tensor that cannot be read.
    """
    items = given
    if isinstance(given, Tensor):
        check_readable(where, name, given)
        if is_mapped(given):
            raise hidden_by_vmap(where, name)
    if isinstance(given, Tensor | np.ndarray):
        items = given.tolist()  # a number where there is no dimension
    unfit = (str, bytes, Mapping, Set) if is_ordered else (str, bytes, Mapping)
    if not isinstance(items, Iterable) or isinstance(items, unfit):
        raise type_error(where, name, rule, shown(given), hint=hint)
    return list(items)


def ints_of(
    where: str, name: str, given: object, *, is_ordered: bool = True, hint: str | None = None
) -> tuple[int, ...]:
    """Ints of at least 0 and below 2**62, from a list, a tensor, an array or another iterable; see `items_of`.

    Raises:
        TypeError, ValueError: anything else.
    """
    rule = "be ints of at least 0"
    items = items_of(where, name, given, rule, is_ordered=is_ordered, hint=hint)
    if not all(is_integer(item) and item >= 0 for item in items):
        raise value_error(where, name, rule, shown(given))
    if items and max(items) >> POSITION_BITS:
        raise value_error(where, name, f"be below 2**{POSITION_BITS}", shown(given))
    return tuple(map(int, items))


def check_readable(where: str, name: str, tensor: Tensor) -> None:
    """Accept only a tensor that holds its values, one after another.

    Raises:
        ValueError: a tensor without values (device "meta"), a sparse or a nested one.
    """
    if tensor.is_meta:
        raise value_error(where, name, "hold values", "a tensor on device meta")
    if tensor.layout != torch.strided or tensor.is_nested:
        got = "a nested tensor" if tensor.is_nested else f"layout {str(tensor.layout).removeprefix('torch.')}"
        raise value_error(where, name, "be a dense tensor", got, hint=f"{name}.to_dense()")


def size_of(where: str, name: str, size: object) -> int:
    """A length or a number of items or heads: also NumPy's, or a symbol while a program is traced."""
    if isinstance(size, torch.SymInt):
        return size  # type: ignore[return-value]
    return integer(where, name, size, 0, below=1 << SIZE_BITS)


def without_list(where: str, name: str, positions: Any) -> Any:
    """Positions as they were handed over, a list (or one for each item) as an int64 tensor.

    Raises:
        TypeError, ValueError: a list of something else, or of lists that are not equally long.
    """
    if not isinstance(positions, list | tuple):
        return positions
    rows = [row if isinstance(row, list | tuple) else [row] for row in positions]
    if not all(is_integer(one) for row in rows for one in row):
        raise type_error(where, name, "be a range, an int64 tensor, a list of ints or None", "a list of something else")
    if len({len(row) for row in rows}) > 1 or len({isinstance(row, list | tuple) for row in positions}) > 1:
        raise value_error(where, name, "have rows of one length", "rows of several lengths")
    if any(abs(int(one)) >> POSITION_BITS for row in rows for one in row):
        raise value_error(where, name, f"be below 2**{POSITION_BITS}", "a larger one")
    return torch.tensor(positions, dtype=torch.int64)


def check_positions(where: str, name: str, positions: object, batch: int, length: int) -> None:
    """Accept None, a range, or an int64 (or int32) tensor ``[length]`` or ``[batch, length]``.

    Raises:
        TypeError: nothing of the kind.
        ValueError: another length or shape, a range that holds a position below 0, or a tensor that cannot be read.
    """
    if positions is None:
        return
    rule = "be a range, an int64 tensor, a list of ints or None"
    if isinstance(positions, range):
        count = length_of(positions)
        if count != length:
            raise value_error(where, name, f"hold {length} positions", count)
        if length and min(positions[0], positions[-1]) < 0:
            raise value_error(where, name, "start at 0 or later", positions)
        return
    if not isinstance(positions, Tensor):
        raise type_error(where, name, rule, kind(positions))
    check_readable(where, name, positions)
    if positions.dtype not in (torch.int64, torch.int32):
        raise type_error(where, name, rule, str(positions.dtype).removeprefix("torch."))
    shape = tuple(positions.shape)
    if shape not in ((length,), (1, length), (batch, length)):
        raise value_error(where, name, f"have shape [{length}] or [{batch}, {length}]", list(shape))


def length_of(span: range) -> int:
    """Of any range: ``len`` itself counts no further than 2**63."""
    try:
        return len(span)
    except OverflowError:
        return max(0, -((span.start - span.stop) // span.step))


def positions_of(given: range | Tensor | None, first: int, length: int) -> Tensor:
    """Checked positions as a tensor; one by one from ``first`` where none are given."""
    if isinstance(given, Tensor):
        return given
    span = range(first, first + length) if given is None else given
    return torch.arange(span.start, span.stop, span.step)
