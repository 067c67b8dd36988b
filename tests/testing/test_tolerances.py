"""The table of tolerances is complete and reasoned; the measure is the one that it states."""

import itertools
import math

import pytest
import torch

from saccade.testing import TOLERANCES, error, tolerance

DTYPES = (torch.float64, torch.float32, torch.bfloat16, torch.float16)


def test_every_dtype_and_quantity_has_a_limit_and_a_reason():
    assert set(TOLERANCES) == set(itertools.product(DTYPES, ("output", "lse", "gradient")))
    assert all(0 < entry.limit < 0.1 and entry.reason for entry in TOLERANCES.values())


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_limits_are_between_one_rounding_and_the_next_coarser_format(dtype):
    coarser = {torch.float64: torch.float32, torch.float32: torch.float16}.get(dtype)
    assert tolerance(dtype, "output") > torch.finfo(dtype).eps / 2
    assert coarser is None or tolerance(dtype, "output") < torch.finfo(coarser).eps / 8


@pytest.mark.parametrize(
    ("got", "want", "expected"),
    [
        ([1.0, 2.0], [1.0, 2.0], 0.0),
        ([0.5], [0.0], 0.5),  # nothing to be relative to
        ([110.0, 1.0], [100.0, 1.0], 0.1),  # relative to the largest
        ([-math.inf, 1.0], [-math.inf, 1.0], 0.0),
        ([math.inf], [-math.inf], math.inf),
        ([math.nan], [math.nan], math.inf),
        ([1.0], [math.inf], math.inf),
        ([], [], 0.0),
    ],
)
def test_error(got, want, expected):
    assert error(torch.tensor(got), torch.tensor(want)) == pytest.approx(expected)
