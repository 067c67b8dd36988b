"""Random calls over the public API: each is answered as the definition answers, or refused by one of our errors."""

from collections import Counter

import pytest
from tests.project.fuzz.calls import KINDS, WrongAnswerError, run


def kinds(numbers):
    found, mistakes = Counter(), []
    for number in numbers:
        try:
            found[run(number)] += 1
        except WrongAnswerError as mistake:
            mistakes.append(str(mistake))
    return found, mistakes


SLOW = [pytest.param(range(start, start + 1000), marks=pytest.mark.slow) for start in range(1000, 11_000, 1000)]


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("numbers", [range(300), *SLOW], ids=str)
def test_calls_at_random(numbers):
    found, mistakes = kinds(numbers)
    assert mistakes == []
    for kind in KINDS:
        assert found[f"{kind.__name__}: answered"], kind
