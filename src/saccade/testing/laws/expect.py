"""Comparisons for laws, with error messages that name the quantity, the index and the difference."""

from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar

import torch
from torch import Tensor

from saccade.support.language import Message
from saccade.testing.tolerances import Quantity, difference, error, tolerance

CANCELLED = 32  # units of rounding that may be left of terms of order one that cancel

_MEASURED: ContextVar[list[float] | None] = ContextVar("measured", default=None)


class LawBroken(AssertionError):  # noqa: N818 - a verdict, not a fault of the program
    """The exception for a broken law; its message describes a counter-example."""


def holds(fact: bool | Tensor, sentence: str) -> None:
    """Raise `LawBroken` with the message ``sentence`` unless ``fact`` is true."""
    if not fact:
        raise LawBroken(Message(sentence))


def close(what: str, got: Tensor, want: Tensor, dtype: torch.dtype, quantity: Quantity = "output") -> None:
    """Raise `LawBroken` unless two tensors agree within the tolerance for the dtype of the inputs."""
    _same_shape(what, got, want)
    wrong, limit = error(got, want), tolerance(dtype, quantity)
    if not wrong <= limit:
        words = "{what} {worst}; error {wrong:.1e}, allowed {limit:.0e}"
        raise LawBroken(Message(words, what=Message(what), worst=_worst(got, want), wrong=wrong, limit=limit))


def same(what: str, got: Tensor, want: Tensor, dtype: torch.dtype, quantity: Quantity = "output") -> None:
    """Raise `LawBroken` unless two results *of one function* agree. NaN equals NaN.

    Laws that use this need not report a wrong NaN, because the law ``oracle`` does.
    """
    _same_shape(what, got, want)
    never = got.isnan() & want.isnan()
    close(what, got.masked_fill(never, 0.0), want.masked_fill(never, 0.0), dtype, quantity)


def near(
    what: str,
    got: Tensor,
    want: Tensor,
    dtype: torch.dtype,
    quantity: Quantity = "output",
    *,
    more: float = 0.0,
    slack: float = 0.0,
) -> None:
    """Raise `LawBroken` if the norm of the error is above the tolerance, or above four times the tolerance in any row.

    The norms are relative to those of the reference; for rows, they are relative to the root mean square of all row
    norms if that is larger. The message states errors in units of rounding, the eps of the dtype.

    A gradient that is 0 because its terms cancel, such as that of a key that is the only one its queries see, keeps the
    rounding of the terms, which are of order one and summed in float32 or float64.

    Args:
        what: the name of the tensor, for the message.
        got: the result.
        want: the reference in float64.
        dtype: the dtype of the inputs.
        quantity: the column of the tolerance table.
        more: a number that is added to the tolerance, for inputs with large scores.
        slack: an absolute difference that is ignored in each entry.
    """
    _same_shape(what, got, want)
    if want.numel() == 0:
        return
    apart, want = difference(got, want), want.detach().double()
    limit, unit = tolerance(dtype, quantity) + more, torch.finfo(dtype).eps
    norms = torch.linalg.vector_norm(want, dim=-1)
    typical = norms.square().mean().sqrt()
    ignored = torch.full_like(norms, slack)
    if quantity == "gradient":
        ignored[norms <= limit * typical] = max(slack, CANCELLED * min(unit, torch.finfo(torch.float32).eps))
    apart = (apart - ignored[..., None]).clamp_min(0.0)
    whole = float(torch.linalg.vector_norm(apart) / torch.linalg.vector_norm(want).clamp_min(1e-300))
    measured = _MEASURED.get()
    if measured is not None:
        measured.append(whole / unit)
    of_rows = torch.linalg.vector_norm(apart, dim=-1) / norms.clamp_min(typical).clamp_min(1e-300)
    worst = float(of_rows.max())
    words = "{what} is off by {error:.1e} of its norm, {units:.3g} units of rounding, allowed {limit:.0e}"
    if not whole <= limit:
        raise LawBroken(Message(words, what=Message(what), error=whole, units=whole / unit, limit=limit))
    if not worst <= 4 * limit:
        row = [int(index) for index in torch.unravel_index(of_rows.argmax(), of_rows.shape)]
        what = Message("{what} in row {row}", what=Message(what), row=row)
        raise LawBroken(Message(words, what=what, error=worst, units=worst / unit, limit=4 * limit))


@contextmanager
def measuring() -> Iterator[list[float]]:
    """A context manager that collects the errors that `near` measures for whole tensors, in units of the eps."""
    measured: list[float] = []
    token = _MEASURED.set(measured)
    try:
        yield measured
    finally:
        _MEASURED.reset(token)


def identical(what: str, got: Tensor, want: Tensor) -> None:
    """Raise `LawBroken` unless two tensors are equal bit by bit (up to the sign of zero)."""
    _same_shape(what, got, want)
    if not torch.equal(got, want):
        raise LawBroken(Message("{what} {worst}; all bits must be equal", what=Message(what), worst=_worst(got, want)))


def _same_shape(what: str, got: Tensor, want: Tensor) -> None:
    words = "{what} has shape {got}, not {want}"
    holds(got.shape == want.shape, Message(words, what=Message(what), got=list(got.shape), want=list(want.shape)))


def _worst(got: Tensor, want: Tensor) -> Message:
    differences = difference(got, want)
    # Take the first of nearly equal differences, since the largest one may depend on the machine.
    first = (differences >= differences.max() * (1.0 - 1e-5)).to(torch.uint8).argmax()
    indices = torch.unravel_index(first, want.shape)
    at = [int(index) for index in indices]
    numbers = {"got": got[indices].item(), "want": want[indices].item()}
    return Message("at {at} is {got:.6g}, not {want:.6g}", at=at, **numbers)
