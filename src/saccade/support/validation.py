"""Validate arguments: integers, numbers, bools, choices, types, and shapes with named sizes.

Each check returns the value, so it can be used where the value is first needed. A value of the wrong type raises a
``TypeError`` that is also a ``ValueError``, so one except clause catches every rejected argument.
"""

from __future__ import annotations

import sys
from collections.abc import Collection
from functools import cache
from numbers import Integral, Real
from typing import Any, TypeGuard, TypeVar

import numpy as np
import torch
from torch import Tensor, nn

from saccade.support.errors import describe, kind, shown, type_error, value_error
from saccade.support.torch_modes import is_tracing

T = TypeVar("T")


def is_integer(value: object) -> TypeGuard[int]:
    """Return whether a value is a whole number: an int or a NumPy integer, but not a bool."""
    return type(value) is int or (isinstance(value, Integral) and not isinstance(value, bool))


def are_integers(values: Collection[object]) -> bool:
    """Return whether `is_integer` is true for all values. This is fast for millions of ints."""
    return set(map(type, values)) <= {int} or all(map(is_integer, values))


def is_number(value: object) -> TypeGuard[float]:
    """Return whether a value is a number: an int, a float or a NumPy number, but not a bool."""
    return type(value) in (int, float) or (isinstance(value, Real) and not isinstance(value, bool))


def is_finite_number(value: object) -> TypeGuard[float]:
    """Return whether a value is a finite number. An int too large for a float does not count."""
    return is_number(value) and abs(int(value) if is_integer(value) else float(value)) <= sys.float_info.max


def check_int(
    name: str, value: object, least: int | None = 1, *, below: int | None = None, hint: str | None = None
) -> int:
    """Check that a value is an integer, at least ``least`` and below ``below``, and return it as an int.

    None means no limit.

    Raises:
        TypeError: the value is not a whole number.
        ValueError: the number is out of range.
    """
    if type(value) is int and (least is None or value >= least) and (below is None or value < below):
        return value
    rule = "be an int" if least is None else f"be an int of at least {least}"
    if not is_integer(value):
        raise type_error(name, rule, shown(value), hint=hint)
    if least is not None and value < least:
        raise value_error(name, rule, value, hint=hint)
    if below is not None and value >= below:
        raise value_error(name, f"be below {below}", value, hint=hint)
    return int(value)


def check_number(
    name: str,
    value: object,
    *,
    least: float | None = None,
    above: float | None = None,
    below: float | None = None,
    hint: str | None = None,
) -> float:
    """Check that a number is finite, at least ``least``, above ``above`` and below ``below``. Return it as a float.

    Raises:
        TypeError: the value is not a number.
        ValueError: the number is NaN, infinite or out of range.
    """
    limits = [f"of at least {least:g}"] if least is not None else []
    limits += [f"above {above:g}"] if above is not None else []
    limits += [f"below {below:g}"] if below is not None else []
    rule = " ".join(["be a finite number", " and ".join(limits)]).strip()
    if not is_number(value):
        raise type_error(name, rule, shown(value), hint=hint)
    fits = is_finite_number(value) and (least is None or value >= least) and (above is None or value > above)
    if not fits or (below is not None and value >= below):
        raise value_error(name, rule, value, hint=hint)
    return float(value)


def check_bool(name: str, value: object) -> bool:
    """Check that a value is a bool, and return it. Other values are rejected, because bool("no") is True.

    Raises:
        TypeError: the value is not a bool.
    """
    if not isinstance(value, bool | np.bool_):
        raise type_error(name, "be True or False", shown(value))
    return bool(value)


def check_choice(name: str, value: T, options: Collection[T], *, hint: str | None = None) -> T:
    """Check that a value is one of the options, and return it.

    Raises:
        ValueError: the value is not one of the options.
    """
    if not any(value is option or (type(value) is type(option) and value == option) for option in options):
        listed = ", ".join(map(repr, options))
        raise value_error(name, f"be one of {listed}", shown(value), hint=hint)
    return value


def check_type(
    name: str, value: object, kinds: type[T] | tuple[type[T], ...], rule: str, *, hint: str | None = None
) -> T:
    """Check that a value has one of the types ``kinds``, and return it.

    ``rule`` describes the types in the error message, as in "be a saccade mask or None".

    Raises:
        TypeError: the value has a different type.
    """
    if not isinstance(value, kinds):
        raise type_error(name, rule, kind(value), hint=hint)
    return value


def is_causal_bias(x: object) -> bool:
    """Return whether a value comes from torch's ``causal_lower_right`` or ``causal_upper_left``.

    Such a value represents a mask, although its memory was never written, and `saccade.masks.as_mask` accepts it.
    Results of torch operations on it have the same class but no longer identify the mask.
    """
    module = sys.modules.get("torch.nn.attention.bias")  # importing it takes a second
    return module is not None and isinstance(x, module.CausalBias)


def check_holds_values(name: str, tensor: Tensor, *, causal_hint: str | None = None) -> None:
    """Raise an error for a tensor subclass without memory, whose values only its own operations can read.

    Subclasses from torch (`FakeTensor`, `DTensor`, functional tensors) are accepted, because they implement all
    operations.

    Raises:
        TypeError: the tensor has no memory, or is torch's ``CausalBias``, whose memory was never written.
    """
    kind_of = type(tensor)
    rule = "be a tensor with its values in memory"
    if is_causal_bias(tensor):
        hint = causal_hint or "pass it as mask= itself, or write mask=masks.Causal()"
        raise type_error(name, rule, kind(tensor), hint=hint)
    if kind_of is Tensor or kind_of.__module__.startswith(("torch.", "saccade.")) or is_tracing():
        return
    if tensor.layout == torch.strided and not tensor.is_meta and tensor.numel() and not tensor.data_ptr():
        hint = f"pass an ordinary tensor with the values of the {kind_of.__name__}"
        raise type_error(name, rule, kind(tensor), hint=hint)


def register_tensor(module: nn.Module, name: str, value: Tensor | None, dtype: torch.dtype | None = None) -> None:
    """Register a tensor in a module's state: a copy in ``dtype``, or the tensor itself if it requires a gradient.

    In that case gradients flow to the caller's tensor, and an `nn.Parameter` becomes a parameter of the module.
    """
    if isinstance(value, nn.Parameter) and value.requires_grad:
        module.register_parameter(name, value)
    elif value is None or value.requires_grad:
        module.register_buffer(name, value)
    else:
        module.register_buffer(name, value.detach().to(dtype, copy=True))


class ShapeSpec:
    """The expected shapes of a function's tensors, written as text in which equal names mean equal sizes.

    A size is a name, a number, ``_`` (any size), or ``...`` at the start (any number of axes). Pass known sizes to
    `check` by name.

    Example:
        >>> import torch
        >>> shapes = ShapeSpec("query [batch, q_len, dim]", "key [batch, kv_len, dim]")
        >>> shapes.check(torch.zeros(2, 3, 8), torch.zeros(2, 5, 8))["kv_len"]
        5
        >>> shapes.check(torch.zeros(2, 3, 8), torch.zeros(2, 5, 6))
        Traceback (most recent call last):
        ValueError: saccade: key must have shape [batch, kv_len, dim] = [2, kv_len, 8]; got [2, 5, 6].
            query  [2, 3, 8]  float32  cpu
            key    [2, 5, 6]  float32  cpu
    """

    def __init__(self, *texts: str):
        self._parts = tuple(_parsed_shape(text) for text in texts)

    def check(self, *tensors: Any, hint: str | None = None, **known: int) -> dict[str, int]:
        """Check the shapes of tensors and return their sizes by name.

        Raises:
            TypeError: an argument is not a tensor.
            ValueError: a shape does not match the text or the sizes of earlier tensors.
        """
        sizes = dict(known)
        for (name, axes, is_open), x in zip(self._parts, tensors, strict=True):
            if not isinstance(x, Tensor):
                raise type_error(name, "be a tensor", type(x).__name__)
            shape = tuple(x.shape[max(0, x.dim() - len(axes)) :] if is_open else x.shape)
            expected: dict[str, int] = {}
            for axis, size in zip(axes, shape, strict=False):
                expected.setdefault(axis, int(axis) if axis.isdigit() else sizes.get(axis, size))
            fits = all(axis == "_" or expected[axis] == size for axis, size in zip(axes, shape, strict=False))
            if len(shape) != len(axes) or not fits:
                raise self._misfit(name, x, tensors, sizes, hint)
            sizes |= expected
        return sizes

    def _misfit(
        self, name: str, x: Tensor, tensors: tuple[Any, ...], sizes: dict[str, int], hint: str | None
    ) -> Exception:
        """Return the error for the tensor ``x``, whose shape does not match the expected one."""
        axes, is_open = next((axes, is_open) for other, axes, is_open in self._parts if other == name)
        lead = ("...",) if is_open else ()
        words, filled = (
            f"[{', '.join(map(str, (*lead, *row)))}]" for row in (axes, [sizes.get(axis, axis) for axis in axes])
        )
        rule = f"have shape {words}" + (f" = {filled}" if filled != words else "")
        named = zip((other for other, _, _ in self._parts), tensors, strict=True)
        facts = [describe(other, tensor) for other, tensor in named if isinstance(tensor, Tensor)]
        return value_error(name, rule, list(x.shape), facts=facts, hint=hint)


@cache
def _parsed_shape(text: str) -> tuple[str, tuple[str, ...], bool]:
    """Parse ``"key [batch, kv_len]"``. Return the name, the axes, and whether further axes may come before them."""
    name, _, inner = text.partition(" [")
    axes = tuple(axis.strip() for axis in inner.rstrip("]").split(",") if axis.strip())
    is_open = bool(axes) and axes[0] == "..."
    return name, axes[1:] if is_open else axes, is_open
