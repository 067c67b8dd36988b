"""The laws of numbers, case by case, for mutation runs, which want many short tests.

Not run by itself: `tests/laws` tries all laws on all cases.
"""

import pytest
import torch
from tests.laws.test_laws import Executed

from saccade import testing

LAWS = {law.name: law for law in testing.LAWS}
NUMBERS = [LAWS[name] for name in ("oracle", "lse", "gradients_of_inputs", "gradients_of_parameters")]
MORE = [LAWS[name] for name in ("gradient_of_bias", "gradients_through_lse", "empty_rows", "blindness", "honesty")]
REST = [law for law in testing.LAWS if law not in (*NUMBERS, *MORE) and law.name not in ("gradcheck", "cost")]
SOME = [case for case in testing.CASES if str(case) in ("causal", "documents", "ragged", "everything", "capped")]
DTYPES = {"tiled": torch.float64, "reference": torch.float64}


def trials(cases, every):
    """Return pairs of a kernel and a case, with every n-th case for each kernel."""
    return [(impl, case) for impl, step in every.items() for case in cases[::step]]


def faults(impl, laws, case):
    """Return the faults of a kernel in a case."""
    laws = [law for law in laws if impl != "sdpa" or "lse" not in (law.needs or ())]
    return list(Executed(impl).faults(laws, [case], [DTYPES.get(impl, torch.float32)]))


@pytest.mark.parametrize(
    ("impl", "case"), trials(testing.CASES, {"tiled": 1, "fused": 2, "reference": 4, "sdpa": 4, "native": 3}), ids=str
)
def test_numbers(impl, case):
    assert faults(impl, NUMBERS, case) == []


@pytest.mark.parametrize(
    ("impl", "case"), trials(testing.CASES, {"tiled": 4, "fused": 6, "reference": 20, "sdpa": 20, "native": 8}), ids=str
)
def test_more(impl, case):
    assert faults(impl, MORE, case) == []


@pytest.mark.parametrize("law", REST, ids=str)
@pytest.mark.parametrize("impl", ["tiled", "fused", "reference", "sdpa", "native"])
def test_the_rest(impl, law):
    cases = SOME if law.cases is None else [None]
    assert [fault for case in cases for fault in faults(impl, [law], case)] == []


@pytest.mark.parametrize(
    ("impl", "case"), trials(testing.LARGE_CASES, {"tiled": 3, "fused": 3, "sdpa": 6, "native": 6}), ids=str
)
def test_a_large_case(impl, case):
    assert faults(impl, NUMBERS, case) == []
