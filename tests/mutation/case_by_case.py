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
DTYPES = {"reference": torch.float64, "tiled": torch.float64, "fused": torch.float32, "sdpa": torch.float32}


@pytest.mark.parametrize("laws", [NUMBERS, MORE], ids=["numbers", "more"])
@pytest.mark.parametrize("impl", [*DTYPES, "auto"])
@pytest.mark.parametrize("case", testing.CASES, ids=str)
def test_a_case(case, impl, laws):
    kept = [law for law in laws if impl != "sdpa" or "lse" not in (law.needs or ())]
    assert list(Executed(impl).faults(kept, [case], [DTYPES.get(impl, torch.float32)])) == []


@pytest.mark.parametrize("impl", ["fused", "tiled", "sdpa"])
@pytest.mark.parametrize("case", testing.LARGE_CASES, ids=str)
def test_a_large_case(case, impl):
    kept = NUMBERS[:1] + NUMBERS[2:] if impl == "sdpa" else NUMBERS
    assert list(Executed(impl).faults(kept, [case], [torch.float32])) == []
