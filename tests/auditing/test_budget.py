"""The share of faults that an audit misses equals that of a simulation."""

import pytest
import torch

from saccade.auditing.budget import Budget


@pytest.mark.parametrize("tests, length, rows", [(12, 48, 1), (12, 48, 12), (30, 512, 40)])
def test_the_share_of_missed_faults_is_that_of_a_simulation(tests, length, rows):
    drawn = torch.randint(length, (20_000, tests), generator=torch.Generator().manual_seed(0))
    simulated = float((drawn >= rows).all(1).double().mean())
    assert Budget(tests, length).missed(rows / length) == pytest.approx(simulated, abs=0.02)


def test_the_text_names_the_share_that_is_surely_found():
    budget = Budget(12, 48)
    share = float(str(budget).split("a fault in ")[1].split("%")[0]) / 100
    assert budget.missed(share + 0.005) <= 0.05 <= budget.missed(share - 0.01)
    assert Budget(144, 48).missed(1 / 48) <= 0.05
    assert "for only 2 sets" in str(Budget(12, 4096))
