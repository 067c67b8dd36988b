"""Registry of first-use checks: which kernels have been compared with the definition, and which failed.

The code that a compiler or a driver generates can be tested only on the machine where it runs. Therefore, the first
product of each kind (kernel, device, dtype, kinds of mask and bias, widths and lengths) is checked, and the result is
recorded. `explain` reports the result, and a kernel that was wrong is not used for this kind of product again.
"""

from __future__ import annotations

import dataclasses
import os
import warnings
from typing import NamedTuple

import torch
from torch import Tensor

from saccade.engine.inputs import AttentionInputs
from saccade.engine.kernels.kernel import Kernel
from saccade.masks import Mask
from saccade.support.errors import value_error
from saccade.support.numerics import is_finite
from saccade.support.torch_modes import is_plain, unobserved


class Compared(NamedTuple):
    """The largest relative error of one quantity among the compared rows of a kernel, and where it occurs."""

    name: str
    error: float
    place: str


@dataclasses.dataclass(frozen=True)
class FirstUse:
    """The result of a first-use check: a few rows of a kernel's product compared with the definition.

    Attributes:
        kernel: name of the kernel.
        place: device on which it ran.
        rows: number of compared rows.
        limit: largest error that is accepted as rounding.
        quantities: errors of output, lse and gradients; only those that were compared.
        raised: the error that the kernel raised; None if it returned results.
        shapes: shapes of query, key and value.
        mask: the mask as text.
        dtype, device: dtype and device of the tensors.
    """

    kernel: str
    place: str
    rows: int
    limit: float
    quantities: tuple[Compared, ...]
    raised: str | None
    shapes: tuple[tuple[int, ...], tuple[int, ...], tuple[int, ...]]
    mask: str
    dtype: torch.dtype
    device: torch.device

    @property
    def ok(self) -> bool:
        """Whether the kernel returned results whose errors can all be explained by rounding."""
        return not self.fault

    @property
    def fault(self) -> str:
        """Description of the kernel's error in one sentence; empty if the kernel passed the check."""
        if self.raised is not None:
            return f"a product for {self._kind} on {self.place} raised {self.raised}"
        worst = max(self.quantities, key=lambda quantity: quantity.error)
        if worst.error <= self.limit:
            return ""
        return (
            f"its first product for {self._kind} on {self.place} differed from the definition: {worst.name} of "
            f"{worst.place} by {worst.error:.2g} of its size, while rounding explains at most {self.limit:g}"
        )

    @property
    def warning(self) -> str:
        """Text of the warning about a wrong kernel: the error, its consequence, and code that reproduces it."""
        kind = f"device={str(self.device)!r}, dtype={self.dtype}"
        shapes = zip(("query", "key", "value"), self.shapes, strict=True)
        lines = [
            f"{self.kernel}: {self.fault}. Another kernel runs such products from now on. To reproduce the error:",
            "import torch",
            "from saccade import testing",
            "from saccade.masks import *",
            *(f"{name} = torch.randn({list(shape)}, {kind})" for name, shape in shapes),
            f"print(testing.first_use({self.kernel!r}, query, key, value, {self.mask}))",
        ]
        return "\n    ".join(lines)

    def raise_if_wrong(self) -> FirstUse:
        """Return this first-use check, or raise an error if the kernel was wrong.

        Raises:
            AssertionError: the kernel was wrong; the message describes the error.
        """
        if self.fault:
            raise AssertionError(f"{self.kernel}: {self.fault}")
        return self

    def __str__(self) -> str:
        if self.fault:
            return f"{self.kernel}: {self.fault}"
        errors = ", ".join(f"{quantity.name} {quantity.error:.1g}" for quantity in self.quantities)
        return f"{self.rows} rows on {self.place} were right within {self.limit:g} of their size ({errors})"

    __repr__ = __str__

    @property
    def _kind(self) -> str:
        return f"{str(self.dtype).removeprefix('torch.')} with {self.mask}"


_VARIABLE, _CHOICES = "SACCADE_FIRST_USE", ("on", "off")
_BLOCK = 128


class _Kind(NamedTuple):
    """A kind of product in first-use checks: the properties that may change the code that compilers generate."""

    kernel: Kernel | str
    device: torch.device
    dtype: torch.dtype
    mask: tuple[object, ...]
    terms: tuple[object, ...]
    width: int
    is_grouped: bool
    lengths: tuple[str, ...]


class _Record(NamedTuple):
    """The latest first-use check for a kind of product, and all checked pairs of value width and need for gradients."""

    result: FirstUse
    covered: frozenset[tuple[int, bool]]


_RECORDS: dict[_Kind, _Record] = {}


def holds(kernel: Kernel, inputs: AttentionInputs, value: Tensor, kernel_inputs: AttentionInputs) -> bool:
    """Return whether a kernel passes the first-use check for this kind of product. Run the check if necessary.

    There is one warning for each kind of product that fails the check.

    Args:
        kernel, inputs, value: kernel, inputs and values of the product.
        kernel_inputs: the inputs as the kernel reads them, possibly with permuted rows.
    """
    if not kernel.is_checked or not is_on(inputs) or inputs.query.is_meta or not is_plain(inputs.query):
        return True
    kind, wanted = _kind_of(kernel, inputs), (value.shape[3], _wants_gradients(inputs, value))
    record = _RECORDS.get(kind)
    if record is not None and (not record.result.ok or _covers(record, wanted)):
        return record.result.ok
    try:
        from saccade.engine.first_use_check.check_kernel import check_kernel  # noqa: PLC0415  GPU kernels only

        with unobserved():
            if not is_finite(inputs.query, inputs.key, value):
                return True  # the reference rows would be NaN; check a later product
            result = check_kernel(kernel, kernel_inputs, value, gradients=wanted[1])
    except torch.OutOfMemoryError:
        return True  # the product may fit into memory without the check; check a smaller one later
    _record(kind, _Record(result, (frozenset() if record is None else record.covered) | {wanted}))
    return result.ok


def failed(
    kernel: Kernel, inputs: AttentionInputs, value: Tensor, kernel_inputs: AttentionInputs, error: Exception
) -> None:
    """Record that a kernel raised an error although its kind of product passed the first-use check, and warn."""
    from saccade.engine.first_use_check.check_kernel import after_error  # noqa: PLC0415  as above

    _record(_kind_of(kernel, inputs), _Record(after_error(kernel, kernel_inputs, value, error), frozenset()))


def _record(kind: _Kind, record: _Record) -> None:
    _RECORDS[kind] = record
    if not record.result.ok:
        warnings.warn(record.result.warning, stacklevel=3)


def reasons(kernel: Kernel, inputs: AttentionInputs) -> tuple[str, ...]:
    """Return the error of a kernel's first-use check for this kind of product, as a tuple of reasons; () if none."""
    record = _RECORDS.get(_kind_of(kernel, inputs)) if kernel.is_checked and is_on(inputs) else None
    return () if record is None or record.result.ok else (record.result.fault,)


def seen(kernel: Kernel, inputs: AttentionInputs) -> str:
    """Return the result of a kernel's first-use check as text for `explain`; empty for kernels that need no check."""
    if not kernel.is_checked:
        return ""
    if not is_on(inputs):
        return f"nothing: {_VARIABLE}=off"
    record = _RECORDS.get(_kind_of(kernel, inputs))
    return (
        "not yet: its first product on this device will be compared with the definition"
        if record is None
        else str(record.result)
    )


def is_on(inputs: AttentionInputs) -> bool:
    """Return whether first-use checks are on. The environment variable ``SACCADE_FIRST_USE`` can switch them off."""
    setting = os.environ.get(_VARIABLE, "on")
    if setting not in _CHOICES:
        raise value_error(_VARIABLE, f"be {' or '.join(_CHOICES)} in the environment", repr(setting))
    return setting == "on"


def _wants_gradients(inputs: AttentionInputs, value: Tensor) -> bool:
    return torch.is_grad_enabled() and any(x is not None and x.requires_grad for x in inputs.sources(value))


def _covers(record: _Record, wanted: tuple[int, bool]) -> bool:
    """Return whether a recorded first-use check covers a product. A check with gradients also covers one without."""
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
        type(kernel).__qualname__ if _is_builtin(kernel) else kernel,
        inputs.device,
        inputs.query.dtype,
        _structure(inputs.rule),
        terms,
        inputs.query.shape[3],
        inputs.query.shape[1] != inputs.key.shape[1],
        (*map(_length_class, inputs.shape[2:]), "square" if inputs.shape[2] == inputs.shape[3] else "oblong"),
    )


def _is_builtin(kernel: Kernel) -> bool:
    return type(kernel).__module__.startswith("saccade.")


def _structure(rule: Mask) -> tuple[object, ...]:
    """Return the nested classes of a mask. Compilers generate the same code for masks with equal classes."""
    return (type(rule), *map(_structure, rule.made_of))


def _length_class(size: int) -> str:
    """Classify a length by how kernels process it: one row, a short block, full blocks, or a remainder."""
    return "one" if size == 1 else "short" if size < _BLOCK else "rest" if size % _BLOCK else "whole"
