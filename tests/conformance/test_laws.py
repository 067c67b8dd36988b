"""Every law, on every case, in every dtype, for every way that our attention is executed."""

from functools import partial

import pytest
import torch

import saccade
from saccade import testing

HALF = (torch.bfloat16, torch.float16)
# Laws that bring neither cases nor dtypes of their own: what can be tried on other cases and in other dtypes.
GENERAL = [law for law in testing.LAWS if law.cases is None and law.dtypes is None]
SUBJECTS = {
    impl: testing.Subject(
        partial(saccade.attention, impl=impl),
        with_lse=partial(saccade.attention_with_lse, impl=impl),
        masks="objects",
        claims=testing.Claims(memory_exponent=None if impl == "reference" else 1.0),
    )
    for impl in ("reference", "fused", "auto")
}


def trials(impl, laws, cases, dtypes, *marks):
    """What there is to try, as pytest parameters: laws that say nothing about a case are left out."""
    for law, case, dtype in testing.trials(laws, cases, dtypes):
        if not law.reasons(SUBJECTS[impl], case):
            name = f"{impl}-{case}-{law}-{str(dtype).removeprefix('torch.')}"
            yield pytest.param(impl, law, case, dtype, id=name, marks=marks)


def is_refused(impl, law, case):
    """What the fused kernel says that it cannot do: a "no" is tested like a "yes"."""
    return impl == "fused" and ("softcap" in (*law.needs, *case.needs) or law.name == "gradient_of_bias")


@pytest.mark.parametrize(
    ("impl", "law", "case", "dtype"),
    [
        *trials("reference", testing.LAWS, testing.CASES, [torch.float64]),
        *trials("fused", testing.LAWS, testing.CASES, [torch.float64, torch.float32]),
        *trials("fused", GENERAL, testing.LARGE_CASES, [torch.float32]),
        *trials("reference", GENERAL, testing.LARGE_CASES, [torch.float64], pytest.mark.slow),
        *trials("fused", GENERAL, [*testing.CASES, *testing.LARGE_CASES], HALF, pytest.mark.slow),
    ],
)
def test_law(impl, law, case, dtype):
    result = testing.try_law(SUBJECTS[impl], law, case, dtype)
    assert result.verdict == ("not offered" if is_refused(impl, law, case) else "kept"), str(result)


@pytest.mark.parametrize("impl", ["reference", "auto"])
@pytest.mark.parametrize(
    "dtype", [torch.float32, *(pytest.param(half, marks=pytest.mark.slow) for half in HALF)], ids=str
)
def test_nothing_is_refused(impl, dtype):
    subject = SUBJECTS[impl]
    report = testing.check(
        subject.function, with_lse=subject.lse_function, masks="objects", laws=GENERAL, dtypes=[dtype]
    )
    assert report.raise_if_broken().ok
    assert not report.not_offered


def test_a_bool_tensor_says_the_same_as_a_mask():
    laws = [
        law for law in GENERAL if law.name in {"oracle", "gradients_of_inputs", "decode", "merge", "isolation", "pure"}
    ]
    report = testing.check(saccade.attention, with_lse=saccade.attention_with_lse, laws=laws, dtypes=[torch.float64])
    assert report.raise_if_broken().ok
    assert not report.not_offered
