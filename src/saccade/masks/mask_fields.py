"""Fields of masks: checks of lists, tensors, lengths and positions, and constant tensors on each device."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Set
from typing import Any

import numpy as np
import torch
from torch import Tensor

from saccade.positions.token_positions import GivenPositions, Positions
from saccade.support.errors import hidden_by_vmap, shown, type_error, value_error
from saccade.support.torch_modes import is_mapped, is_tracing
from saccade.support.validation import check_holds_values, check_int, is_integer

POSITION_BITS = 62
"""Positions, and lengths that are added to them, stay below two to this power: their sums must fit int64."""
SIZE_BITS = 40
"""Sizes that are multiplied by a number of blocks or rows stay below two to this power, for the same reason."""


def check_field(mask: object, name: str, least: int, *, bits: int = POSITION_BITS) -> None:
    """Convert a field of a frozen mask to an int of at least ``least`` and below ``2 ** bits``.

    Raises:
        ValueError: anything else.
    """
    value = check_int(name, getattr(mask, name), least, below=1 << bits)
    object.__setattr__(mask, name, value)


def items_of(name: str, given: object, rule: str, *, is_ordered: bool = True, hint: str | None = None) -> list[Any]:
    """Return the items of a list, tensor, array or other iterable in a mask's field; the items are not checked.

    Args:
        where, name, rule, hint: for the error message.
        given: the argument.
        is_ordered: whether the order matters, so that a set is refused.

    Raises:
        TypeError: no iterable, or a string or mapping.
        ValueError: a tensor that cannot be read.
    """
    items = given
    if isinstance(given, Tensor):
        check_readable(name, given)
        if is_mapped(given):
            raise hidden_by_vmap(name)
    if isinstance(given, Tensor | np.ndarray):
        items = given.tolist()  # a number for a tensor without dimensions
    unfit = (str, bytes, Mapping, Set) if is_ordered else (str, bytes, Mapping)
    if not isinstance(items, Iterable) or isinstance(items, unfit):
        raise type_error(name, rule, shown(given), hint=hint)
    return list(items)


def ints_of(name: str, given: object, *, is_ordered: bool = True, hint: str | None = None) -> tuple[int, ...]:
    """Return the ints of a mask's field, at least 0 and below 2**62, from any iterable; see `items_of`.

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
    """Raise an error unless a mask's tensor holds its values densely.

    Raises:
        ValueError: a tensor without values (device "meta"), a sparse or a nested one.
        TypeError: a subclass whose values are elsewhere, such as torch's ``CausalBias``.
    """
    check_holds_values(name, tensor)
    if tensor.is_meta:
        raise value_error(name, "hold values", "a tensor on device meta")
    if tensor.layout != torch.strided or tensor.is_nested:
        got = "a nested tensor" if tensor.is_nested else f"layout {str(tensor.layout).removeprefix('torch.')}"
        raise value_error(name, "be a dense tensor", got, hint=f"{name}.to_dense()")


def size_of(name: str, size: object) -> int:
    """Return a checked length or number of items or heads; symbols pass while a program is traced."""
    if isinstance(size, torch.SymInt):
        return size  # type: ignore[return-value]
    return check_int(name, size, 0, below=1 << SIZE_BITS)


def written_out(given: GivenPositions, name: str, first: int, length: int, batch: int) -> Tensor:
    """Return positions as int64 ``[batch | 1, length]``, from ``first`` on if None; negative numbers are padding."""
    if given is None:
        return torch.arange(first, first + length, device="cpu")[None]
    if isinstance(given, Tensor):
        check_readable(name, given)
        given = given.clamp(min=-1) if given.dtype == torch.int64 else given
    return Positions.of(given, name, length=length, batch=batch).on()


class Table:
    """A constant tensor of a mask.

    A compiler that traces ``allows`` into a kernel needs tensors that exist already: call `on` for the device before.

    Args:
        values: the tensor, on the CPU.
    """

    def __init__(self, values: Tensor):
        self._on = {"cpu": values}

    def on(self, device: torch.device) -> Tensor:
        """Return the constant tensor on a device."""
        name = device.type if device.index is None else f"{device.type}:{device.index}"
        copied = self._on.get(name)
        if copied is None:
            copied = self._on["cpu"].to(device)
            if type(copied) is Tensor and not is_tracing():
                self._on[name] = copied
        return copied
