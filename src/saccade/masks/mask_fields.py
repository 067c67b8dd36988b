"""Validate the fields of masks (lists, tensors, lengths, positions), and copy constant tensors to each device."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Set
from typing import Any

import numpy as np
import torch
from torch import Tensor

from saccade.positions.token_positions import GivenPositions, Positions
from saccade.support.errors import hidden_by_vmap, shown, type_error, value_error
from saccade.support.torch_modes import is_mapped, is_tracing, num_dispatch_modes, unobserved
from saccade.support.validation import are_integers, check_holds_values, check_int

POSITION_BITS = 62
"""Positions, and lengths added to them, stay below two to this power, so that sums fit int64."""
SIZE_BITS = 40
"""Sizes that are multiplied by a number of blocks or rows stay below two to this power, so that products fit int64."""


def check_field(mask: object, name: str, least: int, *, bits: int = POSITION_BITS) -> None:
    """Check that a field of a mask is an int of at least ``least`` and below ``2 ** bits``, and store it as an int.

    Raises:
        ValueError: the field is not an int within the limits.
    """
    value = check_int(name, getattr(mask, name), least, below=1 << bits)
    object.__setattr__(mask, name, value)


def items_of(name: str, given: object, rule: str, *, is_ordered: bool = True, hint: str | None = None) -> list[Any]:
    """Convert a field of a mask (list, tensor, array or other iterable) to a list, without checking the items.

    Args:
        name, rule, hint: parts of the error message.
        given: the argument.
        is_ordered: whether the order of the items matters, so that a set raises an error.

    Raises:
        TypeError: the field is not iterable, or is a string or mapping.
        ValueError: the field is a tensor whose values cannot be read.
    """
    items = given
    if isinstance(given, Tensor):
        check_readable(name, given)
        if is_mapped(given):
            raise hidden_by_vmap(name)
    if isinstance(given, Tensor | np.ndarray):
        items = given.tolist()  # a number if the tensor has no dimensions
    unfit = (str, bytes, Mapping, Set) if is_ordered else (str, bytes, Mapping)
    if not isinstance(items, Iterable) or isinstance(items, unfit):
        raise type_error(name, rule, shown(given), hint=hint)
    return list(items)


def ints_of(name: str, given: object, *, is_ordered: bool = True, hint: str | None = None) -> tuple[int, ...]:
    """Convert a field of a mask, any iterable, to a tuple of ints from 0 to 2**62 - 1; see `items_of`.

    Raises:
        TypeError, ValueError: the field is not an iterable of ints in this range.
    """
    rule = "be ints of at least 0"
    items = items_of(name, given, rule, is_ordered=is_ordered, hint=hint)
    if items and not (are_integers(items) and min(items) >= 0):
        raise value_error(name, rule, shown(given))
    if items and max(items) >> POSITION_BITS:
        raise value_error(name, f"be below 2**{POSITION_BITS}", shown(given))
    return tuple(map(int, items))


def check_readable(name: str, tensor: Tensor) -> None:
    """Raise an error unless the tensor of a mask is an ordinary dense tensor with values.

    Raises:
        ValueError: the tensor has no values (device "meta"), or is sparse or nested.
        TypeError: the tensor has a class that does not store its values in memory, like torch's ``CausalBias``.
    """
    check_holds_values(name, tensor)
    if tensor.is_meta:
        raise value_error(name, "have values", "a tensor on device meta")
    if tensor.layout != torch.strided or tensor.is_nested:
        got = "a nested tensor" if tensor.is_nested else f"layout {str(tensor.layout).removeprefix('torch.')}"
        raise value_error(name, "be a dense tensor", got, hint=f"{name}.to_dense()")


def size_of(name: str, size: object) -> int:
    """Validate a size of a mask, such as a length or a number of heads. During tracing, it may be symbolic."""
    if isinstance(size, torch.SymInt):
        return size  # type: ignore[return-value]
    return check_int(name, size, 0, below=1 << SIZE_BITS)


def written_out(given: GivenPositions, name: str, first: int, length: int, batch: int) -> Tensor:
    """Convert positions for a mask to int64 ``[batch | 1, length]``; for None, count from ``first``."""
    if given is None:
        return torch.arange(first, first + length, device="cpu")[None]
    if isinstance(given, Tensor):
        check_readable(name, given)
        given = given.clamp(min=-1) if given.dtype == torch.int64 else given
    return Positions.of(given, name, length=length, batch=batch).on()


class Table:
    """A constant tensor of a mask, with a copy on each device where it is needed.

    A compiler that traces ``allows`` into a kernel needs existing tensors, so call `on` for the device first.

    Args:
        values: the entries.
    """

    def __init__(self, values: np.ndarray[Any, Any]):
        self._values = values
        with unobserved():  # a tensor of a fake or functional mode would be useless outside of it
            self._on = {"cpu": torch.from_numpy(values)}

    def on(self, device: torch.device) -> Tensor:
        """Return the mask's constant tensor on the given device."""
        name = device.type if device.index is None else f"{device.type}:{device.index}"
        if not is_tracing() and num_dispatch_modes():
            return torch.from_numpy(self._values).to(device)  # fake and functional modes accept only their own tensors
        copied = self._on.get(name)
        if copied is None:
            copied = self._on["cpu"].to(device)
            if type(copied) is Tensor and not is_tracing():
                self._on[name] = copied
        return copied
