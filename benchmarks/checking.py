"""Correctness checks that run before anything is timed."""

from collections.abc import Sequence

import torch
from torch import Tensor

from saccade.masks import Mask

ERRORS = {torch.float32: 2e-5, torch.bfloat16: 3e-2}
"""Allowed difference of outputs and gradients of standard normal inputs, absolute and relative."""


def assert_agree(ours: Tensor, theirs: Tensor) -> None:
    """Raise an error unless both sides computed the same."""
    error = ERRORS[ours.dtype]
    size = theirs.detach().double().square().mean().sqrt().item()  # sums of large terms may cancel
    torch.testing.assert_close(ours, theirs.to(ours.dtype), rtol=error, atol=error * max(1.0, size))


def some_rows(n: int, count: int = 24) -> Tensor:
    """Return row numbers spread over a sequence, including both ends."""
    return torch.linspace(0, n - 1, min(n, count)).round().to(torch.int64).unique()


def by_definition(query: Tensor, key: Tensor, value: Tensor, mask: Mask, rows: Tensor) -> Tensor:
    """Compute a few rows of attention in float64 from all pairs of the mask, at any length."""
    keys = torch.arange(key.shape[2])
    allowed = mask.allows(
        torch.arange(query.shape[0])[:, None, None, None],
        torch.arange(query.shape[1])[:, None, None],
        rows[:, None],
        keys,
    )
    scores = query[:, :, rows].double() @ key.double().mT * query.shape[3] ** -0.5
    return scores.masked_fill(~allowed, -torch.inf).softmax(-1) @ value.double()


def assert_rows_by_definition(out: Tensor, inputs: Sequence[Tensor], mask: Mask, rows: Tensor | None = None) -> None:
    """Raise an error unless rows of an output equal the definition with the mask."""
    rows = some_rows(out.shape[2]) if rows is None else rows
    assert_agree(out[:, :, rows], by_definition(*inputs, mask, rows))
