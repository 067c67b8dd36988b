"""Tolerances of the laws: one table of allowed errors, the same on every machine.

The error of a tensor is its largest absolute difference from the reference, divided by the largest magnitude of
the reference, or by 1 if that is smaller, because inputs and results of all cases are of order one, and a gradient
of zero has no scale. Two equal infinities have no difference, and NaN differs from everything.
"""

from typing import Literal, NamedTuple

import torch
from torch import Tensor

Quantity = Literal["output", "lse", "gradient"]


class Tolerance(NamedTuple):
    """The largest error of a result that counts as rounding, and the reason for this limit."""

    limit: float
    reason: str


TOLERANCES: dict[tuple[torch.dtype, Quantity], Tolerance] = {
    (torch.float64, "output"): Tolerance(
        1e-11, "sums of up to 1e4 terms of 1.1e-16 each, in any order; float32 anywhere would show as 1e-8"
    ),
    (torch.float64, "lse"): Tolerance(1e-11, "as the output"),
    (torch.float64, "gradient"): Tolerance(1e-10, "a second chain of sums on top of the first"),
    (torch.float32, "output"): Tolerance(
        1e-5,
        "sums of up to 1e3 terms, each rounded by 6e-8 in either direction (2e-6 together); half precision anywhere "
        "would show as 1e-3",
    ),
    (torch.float32, "lse"): Tolerance(1e-5, "as the output"),
    (torch.float32, "gradient"): Tolerance(1e-5, "as the output: both chains of sums together stay below it"),
    (torch.bfloat16, "output"): Tolerance(
        1e-2, "rounded once at the end (2e-3), and the weights once before they meet the values (2e-3 each)"
    ),
    (torch.bfloat16, "lse"): Tolerance(1e-5, "a float32 result of float32 sums of exact products"),
    (torch.bfloat16, "gradient"): Tolerance(
        2e-2, "weights, their gradients and the output that enters them are each rounded (2e-3) before a sum"
    ),
    (torch.float16, "output"): Tolerance(2e-3, "as bfloat16, with three bits more"),
    (torch.float16, "lse"): Tolerance(1e-5, "as bfloat16"),
    (torch.float16, "gradient"): Tolerance(4e-3, "as bfloat16, with three bits more"),
}


def tolerance(dtype: torch.dtype, quantity: Quantity) -> float:
    """Return the largest error that counts as rounding for inputs in the given dtype."""
    return TOLERANCES[dtype, quantity].limit


def error(got: Tensor, want: Tensor) -> float:
    """Return the error of ``got`` for comparison with a tolerance: inf if an entry is NaN, 0 for empty tensors."""
    if want.numel() == 0:
        return 0.0
    differences = difference(got, want)
    finite = torch.where(torch.isfinite(want), want.detach().double().abs(), 0.0)
    return float(differences.max() / finite.max().clamp_min(1.0))


def difference(got: Tensor, want: Tensor) -> Tensor:
    """Return the absolute differences of two tensors in float64, with 0 for equal infinities and inf for a NaN."""
    got, want = got.detach().double(), want.detach().double()
    return torch.where(got == want, 0.0, (got - want).abs()).nan_to_num(nan=torch.inf, posinf=torch.inf)
