"""Every measurement of every claim can fail: some mistake among the mutants turns it."""

import collections

import pytest
from tests.theory.mutants import MUTANTS

from saccade import theory

BY_CLAIM = collections.defaultdict(list)
for name, _, wrong in MUTANTS:
    BY_CLAIM[name].append(wrong)


@pytest.mark.slow
@pytest.mark.parametrize("claim", theory.CLAIMS, ids=lambda claim: claim.name)
def test_a_mutant_turns_each_measurement(claim):
    turned = {
        (place, one.what)
        for wrong in BY_CLAIM[claim.name]
        for place, one in enumerate(claim.check(7, **wrong))
        if not one.agrees
    }
    assert [own for own in enumerate(one.what for one in claim.check(7)) if own not in turned] == []
