"""`near`: norms of tensors and rows, in units of rounding."""

import pytest
import torch

from saccade import testing
from saccade.testing.laws.expect import LawBroken, measuring, near
from saccade.testing.plain_kernel import attend

WANT = torch.randn(2, 3, 50, 8, generator=torch.Generator().manual_seed(0), dtype=torch.float64)


@pytest.mark.parametrize(
    ("got", "message"),
    [
        (WANT * 0, r"x is off by 1.0e\+00 of its norm, 8.39e\+06 units of rounding, allowed 1e-05"),
        (WANT * 1.001, r"x is off by 1.0e-03 of its norm, 8.39e\+03 units of rounding"),
        (WANT * torch.nan, r"x is off by inf of its norm"),
        (WANT.roll(1, 2), r"x is off by"),
        (WANT[:, :, :-1], r"x has shape \[2, 3, 49, 8\], not \[2, 3, 50, 8\]"),
    ],
)
def test_zeros_noise_nan_and_other_shapes_are_not_near(got, message):
    with pytest.raises(LawBroken, match=message):
        near("x", got, WANT, torch.float32)


def test_a_single_wrong_row_is_named():
    got = WANT.clone()
    got[1, 2, 33] *= 1 + 1e-4
    with pytest.raises(LawBroken, match=r"x in row \[1, 2, 33\] is off by .* units of rounding, allowed 4e-05"):
        near("x", got, WANT, torch.float32)
    near("x", got, WANT, torch.bfloat16)


def test_a_larger_limit_and_a_slack_allow_more():
    with pytest.raises(LawBroken, match="x is off by"):
        near("x", WANT + 1e-3, WANT, torch.float32)
    near("x", WANT + 1e-3, WANT, torch.float32, more=1e-2)
    near("x", WANT + 1e-3, WANT, torch.float32, slack=1.1e-3)
    near("x", WANT[:0], WANT[:0], torch.float32)


def test_rows_whose_terms_cancel_may_keep_the_rounding_of_the_terms():
    eps = torch.finfo(torch.float32).eps
    want = WANT * 0.01
    want[1, 2, 33] = 0
    got = want.clone()
    got[1, 2, 33] = 30 * eps
    near("x", got, want, torch.float32, "gradient")
    near("x", got[1, 2, 33:34], want[1, 2, 33:34], torch.float32, "gradient")  # nothing but such a row
    with pytest.raises(LawBroken, match="x is off by"):
        near("x", got[1, 2, 33:34], want[1, 2, 33:34], torch.float32)  # the terms of an output do not cancel
    got[1, 2, 32] += 30 * eps
    with pytest.raises(LawBroken, match="x is off by"):
        near("x", got, want, torch.float32, "gradient")
    got = want.clone()
    got[1, 2, 33] = 0.01
    for dtype in (torch.float64, torch.float32, torch.bfloat16):
        with pytest.raises(LawBroken, match="x"):
            near("x", got, want, dtype, "gradient")


def test_errors_are_measured_in_units_of_rounding():
    with measuring() as measured:
        near("x", WANT * (1 + 3 * torch.finfo(torch.float64).eps), WANT, torch.float64)
    near("x", WANT, WANT, torch.float64)
    assert measured == pytest.approx([3.0], abs=1.0)


def test_results_tell_the_largest_error_of_a_law():
    report = testing.check(attend, laws=["callers"], seed=0)
    assert len(report.kept) == 6
    assert all(0.1 < result.roundings < 40.0 for result in report.kept)
    assert {result.roundings for result in testing.check(attend, cases=["causal"], laws=["oracle"], seed=0).kept} == {
        None
    }
