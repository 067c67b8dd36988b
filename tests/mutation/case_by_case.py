"""The laws of numbers, a case at a time: for mutation runs, which want many tests that each take little.

Not collected by itself: `tests/conformance` tries all laws on all cases.
"""

import pytest
import torch
from tests.conformance.test_laws import Executed

from saccade import testing

LAWS = {law.name: law for law in testing.LAWS}
NUMBERS = [LAWS[name] for name in ("oracle", "lse", "gradients_of_inputs", "gradients_of_parameters")]
MORE = [LAWS[name] for name in ("gradient_of_bias", "gradients_through_lse", "empty_rows", "blindness", "honesty")]
DTYPES = {"tiled": torch.float64, "fused": torch.float32, "reference": torch.float64, "sdpa": torch.float32}


def _trials(cases, every):
    """A kernel and a case: each kernel on every so-manieth."""
    pairs = [(impl, case) for impl, step in every.items() for case in cases[::step]]
    return [pytest.param(impl, case, id=f"{impl}-{case}") for impl, case in pairs]


def _faults(impl, laws, case, dtype):
    kept = [law for law in laws if impl != "sdpa" or "lse" not in (law.needs or ())]
    return list(Executed(impl).faults(kept, [case], [dtype]))


@pytest.mark.parametrize("impl, case", _trials(testing.CASES, {"tiled": 1, "fused": 1, "reference": 2, "sdpa": 2}))
def test_numbers(impl, case):
    assert _faults(impl, NUMBERS, case, DTYPES[impl]) == []


@pytest.mark.parametrize("impl, case", _trials(testing.CASES, {"tiled": 2, "fused": 3, "reference": 6, "sdpa": 6}))
def test_more(impl, case):
    assert _faults(impl, MORE, case, DTYPES[impl]) == []


@pytest.mark.parametrize("impl, case", _trials(testing.LARGE_CASES, {"tiled": 3, "fused": 2, "sdpa": 6}))
def test_a_large_case(impl, case):
    assert _faults(impl, NUMBERS, case, torch.float32) == []
