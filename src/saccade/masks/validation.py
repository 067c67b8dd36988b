"""What masks are made from, checked: lists of whole numbers, tensors that are read, lengths and positions."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Set
from typing import Any

import numpy as np
import torch
from torch import Tensor

from saccade.positions.token_positions import GivenPositions, Positions
from saccade.support.errors import hidden_by_vmap, shown, type_error, value_error
from saccade.support.torch_modes import is_mapped
from saccade.support.validation import check_holds_values, check_int, is_integer

__all__ = [
    "POSITION_BITS",
    "SIZE_BITS",
    "check_field",
    "check_readable",
    "items_of",
    "ints_of",
    "size_of",
    "written_out",
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
    value = check_int(name, getattr(mask, name), least, below=1 << bits)
    object.__setattr__(mask, name, value)


def items_of(name: str, given: object, rule: str, *, is_ordered: bool = True, hint: str | None = None) -> list[Any]:
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
        check_readable(name, given)
        if is_mapped(given):
            raise hidden_by_vmap(name)
    if isinstance(given, Tensor | np.ndarray):
        items = given.tolist()  # a number where there is no dimension
    unfit = (str, bytes, Mapping, Set) if is_ordered else (str, bytes, Mapping)
    if not isinstance(items, Iterable) or isinstance(items, unfit):
        raise type_error(name, rule, shown(given), hint=hint)
    return list(items)


def ints_of(name: str, given: object, *, is_ordered: bool = True, hint: str | None = None) -> tuple[int, ...]:
    """Ints of at least 0 and below 2**62, from a list, a tensor, an array or another iterable; see `items_of`.

    Raises:
        TypeError, ValueError: anything else.
    """
    rule = "be ints of at least 0"
    items = items_of(name, given, rule, is_ordered=is_ordered, hint=hint)
    if not all(is_integer(item) and item >= 0 for item in items):
        raise value_error(name, rule, shown(given))
    if items and max(items) >> POSITION_BITS:
        raise value_error(name, f"be below 2**{POSITION_BITS}", shown(given))
    return tuple(map(int, items))


def check_readable(name: str, tensor: Tensor) -> None:
    """Accept only a tensor that holds its values, one after another.

    Raises:
        ValueError: a tensor without values (device "meta"), a sparse or a nested one.
        TypeError: a subclass that keeps its values elsewhere; torch's ``CausalBias``.
    """
    check_holds_values(name, tensor)
    if tensor.is_meta:
        raise value_error(name, "hold values", "a tensor on device meta")
    if tensor.layout != torch.strided or tensor.is_nested:
        got = "a nested tensor" if tensor.is_nested else f"layout {str(tensor.layout).removeprefix('torch.')}"
        raise value_error(name, "be a dense tensor", got, hint=f"{name}.to_dense()")


def size_of(name: str, size: object) -> int:
    """A length or a number of items or heads: also NumPy's, or a symbol while a program is traced."""
    if isinstance(size, torch.SymInt):
        return size  # type: ignore[return-value]
    return check_int(name, size, 0, below=1 << SIZE_BITS)


def written_out(given: GivenPositions, name: str, first: int, length: int, batch: int) -> Tensor:
    """Positions, int64 ``[batch | 1, length]``; from ``first`` on when None. In a tensor all below 0 mean no token."""
    if given is None:
        return torch.arange(first, first + length, device="cpu")[None]
    if isinstance(given, Tensor):
        check_readable(name, given)
        given = given.clamp(min=-1) if given.dtype == torch.int64 else given
    return Positions.of(given, name, length=length, batch=batch).on()
