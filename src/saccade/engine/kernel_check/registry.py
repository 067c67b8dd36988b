"""First use: where a compiled kernel runs for the first time, a few of its rows are compared with the definition.

What a compiler or a driver makes of a kernel is known only where it runs. So the first product of each kind (kernel,
device, dtype, kinds of mask and bias, widths and lengths) pays for a look, and what was seen is kept: `explain` tells
it, and a kernel that was wrong is not asked for that kind again.
"""

from __future__ import annotations

import os
import warnings
from typing import NamedTuple

import torch
from torch import Tensor

from saccade.engine.inputs import AttentionInputs
from saccade.engine.kernel_check.result import FirstUse
from saccade.engine.kernels.kernel import Kernel
from saccade.masks import Mask
from saccade.support.errors import value_error
from saccade.support.numerics import is_finite
from saccade.support.torch_modes import is_plain, unobserved

_VARIABLE, _CHOICES = "SACCADE_FIRST_USE", ("on", "off")
_BLOCK = 128


class _Kind(NamedTuple):
    """Properties of a product for which a compiler makes code of its own, as far as is known."""

    kernel: Kernel | str
    device: torch.device
    dtype: torch.dtype
    mask: tuple[object, ...]
    terms: tuple[object, ...]
    width: int
    is_grouped: bool
    lengths: tuple[str, ...]


class _Record(NamedTuple):
    """The last check of a kind, and the (value width, gradients) that checks have covered."""

    found: FirstUse
    covered: frozenset[tuple[int, bool]]


_RECORDS: dict[_Kind, _Record] = {}


def holds(kernel: Kernel, inputs: AttentionInputs, value: Tensor, own: AttentionInputs) -> bool:
    """Whether a kernel may run this product: it was seen to hold for its kind, or is now.

    Warns, once for each kind, where it was not.

    Args:
        kernel, inputs, value: of the product.
        own: the ingredients as the kernel gets them, in an order of its own.
    """
    if not kernel.is_checked or not is_on(inputs) or inputs.query.is_meta or not is_plain(inputs.query):
        return True
    kind, wanted = _kind_of(kernel, inputs), (value.shape[3], _wants_gradients(inputs, value))
    record = _RECORDS.get(kind)
    if record is not None and (not record.found.ok or _covers(record, wanted)):
        return record.found.ok
    try:
        from saccade.engine.kernel_check.compare import check_kernel  # noqa: PLC0415  no processor's kernel needs it

        with unobserved():
            if not is_finite(inputs.query, inputs.key, value):
                return True  # the definition of these rows is NaN; a later product will do
            found = check_kernel(kernel, own, value, gradients=wanted[1])
    except torch.OutOfMemoryError:
        return True  # the product may fit without a look; a smaller one of its kind will do
    _keep(kind, _Record(found, (frozenset() if record is None else record.covered) | {wanted}))
    return found.ok


def failed(kernel: Kernel, inputs: AttentionInputs, value: Tensor, own: AttentionInputs, error: Exception) -> None:
    """Note that a kernel raised in a product whose kind had been seen to hold, and warn."""
    from saccade.engine.kernel_check.compare import after_error  # noqa: PLC0415  as above

    _keep(_kind_of(kernel, inputs), _Record(after_error(kernel, own, value, error), frozenset()))


def _keep(kind: _Kind, record: _Record) -> None:
    _RECORDS[kind] = record
    if not record.found.ok:
        warnings.warn(record.found.warning, stacklevel=3)


def reasons(kernel: Kernel, inputs: AttentionInputs) -> tuple[str, ...]:
    """Why a kernel is not to be asked again for such a product: what was wrong when it first ran; empty if nothing."""
    record = _RECORDS.get(_kind_of(kernel, inputs)) if kernel.is_checked and is_on(inputs) else None
    return () if record is None or record.found.ok else (record.found.fault,)


def seen(kernel: Kernel, inputs: AttentionInputs) -> str:
    """Return the recorded check of a kernel for such a product, for `explain`; empty for kernels without a check."""
    if not kernel.is_checked:
        return ""
    if not is_on(inputs):
        return f"nothing: {_VARIABLE}=off"
    record = _RECORDS.get(_kind_of(kernel, inputs))
    return (
        "nothing yet: its first product here will be compared with the definition"
        if record is None
        else str(record.found)
    )


def is_on(inputs: AttentionInputs) -> bool:
    """Whether kernels are looked at, unless the environment says no."""
    told = os.environ.get(_VARIABLE, "on")
    if told not in _CHOICES:
        raise value_error(_VARIABLE, f"be {' or '.join(_CHOICES)} in the environment", repr(told))
    return told == "on"


def _wants_gradients(inputs: AttentionInputs, value: Tensor) -> bool:
    return torch.is_grad_enabled() and any(x is not None and x.requires_grad for x in inputs.sources(value))


def _covers(record: _Record, wanted: tuple[int, bool]) -> bool:
    """Return whether a check covers a product; one with gradients also covers the forward pass."""
    return wanted in record.covered or (wanted[0], True) in record.covered


def _kind_of(kernel: Kernel, inputs: AttentionInputs) -> _Kind:
    bias = inputs.bias
    terms = (
        None if bias is None else (type(bias), bias.source.requires_grad, bias.source.dtype),
        inputs.softcap is not None,
        type(inputs.tile_function),
        inputs.modification is not None,
    )
    return _Kind(
        type(kernel).__qualname__ if _is_ours(kernel) else kernel,
        inputs.device,
        inputs.query.dtype,
        _structure(inputs.rule),
        terms,
        inputs.query.shape[3],
        inputs.query.shape[1] != inputs.key.shape[1],
        (*map(_length, inputs.shape[2:]), "square" if inputs.shape[2] == inputs.shape[3] else "oblong"),
    )


def _is_ours(kernel: Kernel) -> bool:
    return type(kernel).__module__.startswith("saccade.")


def _structure(rule: Mask) -> tuple[object, ...]:
    """Return the classes that a mask is made of: a compiler distinguishes these, numbers aside."""
    return (type(rule), *map(_structure, rule.made_of))


def _length(size: int) -> str:
    """Kernels treat a single row, less than a block, whole blocks and a rest in ways of their own."""
    return "one" if size == 1 else "short" if size < _BLOCK else "rest" if size % _BLOCK else "whole"
