"""Expectations of laws: comparisons whose error names the quantity, the index and the difference."""

import torch
from torch import Tensor

from saccade.testing.tolerances import Quantity, difference, error, tolerance


class LawBroken(AssertionError):  # noqa: N818 - a verdict, not a fault of the program
    """The error for a broken law. The message is a counter-example."""


def holds(fact: bool | Tensor, sentence: str) -> None:
    """Raise `LawBroken` with ``sentence`` as message unless the fact is true."""
    if not fact:
        raise LawBroken(sentence)


def close(what: str, got: Tensor, want: Tensor, dtype: torch.dtype, quantity: Quantity = "output") -> None:
    """Raise `LawBroken` unless two tensors agree within the tolerance for the dtype of the inputs."""
    _same_shape(what, got, want)
    wrong, limit = error(got, want), tolerance(dtype, quantity)
    if not wrong <= limit:
        raise LawBroken(f"{what} {_worst(got, want)}; error {wrong:.1e}, allowed {limit:.0e}")


def same(what: str, got: Tensor, want: Tensor, dtype: torch.dtype, quantity: Quantity = "output") -> None:
    """Raise `LawBroken` unless two results *of one function* agree, where NaN equals NaN.

    Laws that use this need not report a wrong NaN, because the law ``oracle`` does.
    """
    _same_shape(what, got, want)
    never = got.isnan() & want.isnan()
    close(what, got.masked_fill(never, 0.0), want.masked_fill(never, 0.0), dtype, quantity)


def identical(what: str, got: Tensor, want: Tensor) -> None:
    """Raise `LawBroken` unless two tensors are equal bit by bit (up to the sign of zero)."""
    _same_shape(what, got, want)
    if not torch.equal(got, want):
        raise LawBroken(f"{what} {_worst(got, want)}; not a bit may differ")


def _same_shape(what: str, got: Tensor, want: Tensor) -> None:
    holds(got.shape == want.shape, f"{what} has shape {list(got.shape)}, not {list(want.shape)}")


def _worst(got: Tensor, want: Tensor) -> str:
    differences = difference(got, want)
    # Take the first of nearly equal differences, since the largest one may depend on the machine.
    first = (differences >= differences.max() * (1.0 - 1e-5)).to(torch.uint8).argmax()
    place = torch.unravel_index(first, want.shape)
    at = [int(index) for index in place]
    return f"at {at} is {got[place].item():.6g}, not {want[place].item():.6g}"
