"""What masks are made from, checked: whole numbers, lists of them, tensors that are read, other masks."""

from __future__ import annotations

import reprlib
from collections.abc import Iterable, Mapping, Set
from itertools import islice
from typing import Any

import numpy as np
import torch
from torch import Tensor

from saccade.arguments import is_integer
from saccade.errors import hidden_by_vmap, type_error, value_error
from saccade.transforms import is_mapped

__all__ = [
    "POSITION_BITS",
    "SIZE_BITS",
    "check_field",
    "check_int",
    "check_ints",
    "check_positions",
    "check_readable",
    "kind",
    "length_of",
    "lengths",
    "listed",
    "positions_of",
    "shown",
    "size_of",
    "without_list",
]

POSITION_BITS = 62
"""Positions, and lengths that are added to them, stay below two to this power: their sums must fit int64."""
SIZE_BITS = 40
"""Sizes that are multiplied by a number of blocks or rows stay below two to this power, for the same reason."""

_MOST = 1 << 22  # items of one list: each is looked at here, one by one


class _Short(reprlib.Repr):
    """A value on one line: long lists are cut short, and of tensors and arrays nothing is read."""

    def repr1(self, x: Any, level: int) -> str:
        if isinstance(x, Tensor | np.ndarray):
            noun = "tensor" if isinstance(x, Tensor) else "array"
            return f"{noun} {list(x.shape)} {str(x.dtype).removeprefix('torch.')}"
        if isinstance(x, type):
            return kind(x)
        return " ".join(super().repr1(x, level).split())


_SHORT = _Short()


def shown(value: object) -> str:
    """A value as error messages show it."""
    return _SHORT.repr(value)


def kind(value: object) -> str:
    """What a value is, as error messages say it: the name of its type, or "the class X" for a class itself."""
    return f"the class {value.__name__}" if isinstance(value, type) else type(value).__name__


def check_int(
    where: str,
    name: str,
    value: object,
    least: int,
    *,
    bits: int | None = POSITION_BITS,
    hint: str | None = None,
) -> int:
    """Accept only an int of at least ``least`` and below ``2 ** bits`` (None: as large as it may be).

    Returns:
        It as an int, also where it is one of NumPy's: equal masks are equal programs and texts.

    Raises:
        ValueError: anything else; a bool is no int.
    """
    if not is_integer(value) or value < least:
        raise value_error(where, name, f"be an int of at least {least}", shown(value), hint=hint)
    value = int(value)
    if bits is not None and value >> bits:
        raise value_error(where, name, f"be below 2**{bits}", shown(value), hint=hint)
    return value


def check_field(mask: object, name: str, least: int, *, bits: int | None = POSITION_BITS) -> None:
    """Same as `check_int` for a field of a frozen mask, which then holds an int."""
    object.__setattr__(mask, name, check_int(type(mask).__name__, name, getattr(mask, name), least, bits=bits))


def check_ints(where: str, name: str, values: list[Any], rule: str, got: object, *, hint: str | None = None) -> None:
    """Accept only ints of at least 0 and below 2**62.

    Raises:
        ValueError: anything else; ``rule`` and ``got`` make the sentence.
    """
    for value in values:
        if not is_integer(value) or value < 0:
            raise value_error(where, name, rule, shown(got), hint=hint)
        if int(value) >> POSITION_BITS:
            raise value_error(where, name, f"be below 2**{POSITION_BITS}", shown(value))


def listed(
    where: str, name: str, given: object, rule: str, *, is_ordered: bool = True, hint: str | None = None
) -> list[Any]:
    """The items of a list, of an int tensor, or of another iterable, which are yet to be checked.

    Args:
        where, name: the function and its argument, for error messages.
        given: what was handed over.
        rule: what it must be, for error messages.
        is_ordered: the order matters, so that a set will not do.
        hint: for error messages.

    Raises:
        TypeError: nothing that can be gone through; text, bytes and mappings, whose items are not what is meant.
        ValueError: a tensor of something else than ints, or more than 2**22 items.
    """
    if isinstance(given, Tensor):
        check_readable(where, name, given)
        if is_mapped(given):
            raise hidden_by_vmap(where, name)
        if given.is_floating_point() or given.is_complex() or given.dtype == torch.bool:
            raise value_error(where, name, rule, shown(given), hint=hint)
        if given.dim() == 0:
            raise type_error(where, name, rule, shown(given), hint=hint)
        if given.numel() > _MOST:
            raise value_error(where, name, f"be at most {_MOST}", given.numel())
        items: list[Any] = given.tolist()
        return items
    if isinstance(given, str | bytes | bytearray | Mapping) or (is_ordered and isinstance(given, Set)):
        raise type_error(where, name, rule, shown(given), hint=hint)
    try:
        iterator = iter(given) if isinstance(given, Iterable) else None
    except TypeError:  # arrays of no dimension
        iterator = None
    if iterator is None:
        raise type_error(where, name, rule, shown(given), hint=hint)
    items = [int(item) if isinstance(item, np.integer) else item for item in islice(iterator, _MOST + 1)]
    if len(items) > _MOST:
        raise value_error(where, name, f"be at most {_MOST}", "more")
    return items


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


def lengths(where: str, q_len: object, kv_len: object) -> tuple[int, int]:
    """Numbers of queries and keys; as many keys as queries when None."""
    rows = size_of(where, "q_len", q_len)
    return rows, rows if kv_len is None else size_of(where, "kv_len", kv_len)


def size_of(where: str, name: str, size: object) -> int:
    """A length or number that is accepted: also an integer of NumPy, or a symbol while a program is traced."""
    if isinstance(size, torch.SymInt):
        return size  # type: ignore[return-value]
    return check_int(where, name, size, 0, bits=SIZE_BITS)


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
