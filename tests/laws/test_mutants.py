"""The laws judge themselves: a correct implementation keeps all of them, and each catches its mutants."""

import pytest
import torch
from tests.mutants.mutant import MUTANTS, subject_of
from tests.sampled import MANY

from saccade import testing
from saccade.testing.pattern_cases import PATTERNS

DTYPES = (torch.float64, torch.float32)
CASES = [case for case in testing.CASES if case not in PATTERNS]  # told to them like any other, by a tensor
LAW = {law.name: law for law in testing.LAWS}


@pytest.mark.ci
@pytest.mark.parametrize("cases", [CASES[::8], pytest.param(CASES, marks=pytest.mark.slow)], ids=["few", "every"])
@pytest.mark.parametrize("law", testing.LAWS, ids=str)
def test_a_correct_implementation_keeps_the_law(law, cases):
    subject = subject_of(testing.Stepwise())
    results = [testing.try_law(subject, *trial) for trial in testing.trials([law], cases, DTYPES[:1])]
    assert [str(result) for result in results if result.verdict not in ("kept", "not applicable")] == []
    assert any(result.verdict == "kept" for result in results)


@pytest.mark.ci
@pytest.mark.parametrize(
    ("mutant", "law"),
    [
        pytest.param(mutant, name, id=f"{mutant}-{name}", marks=MANY if number else ())
        for mutant in MUTANTS
        for number, name in enumerate(mutant.caught_by)
    ],
)
def test_a_mutant_is_caught(mutant, law):
    subject = mutant.subject()
    trials = testing.trials([LAW[law]], testing.CASES, DTYPES)
    assert any(testing.try_law(subject, *trial).verdict == "broken" for trial in trials), mutant.mistake


def test_every_law_catches_a_mutant():
    assert {name for mutant in MUTANTS for name in mutant.caught_by} == set(LAW)


def test_every_mutant_and_every_law_says_what_it_is():
    assert all(mutant.mistake.endswith((".", "?")) for mutant in MUTANTS)
    assert all(law.statement.endswith(".") for law in testing.LAWS)
    assert len({mutant.name for mutant in MUTANTS}) == len(MUTANTS)
