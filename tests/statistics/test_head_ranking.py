"""Tests of the ranking of heads by their values, with equal values in order."""

import pytest
import torch

from saccade.statistics.head_ranking import rank_heads
from saccade.statistics.information import position_information, unexplained_information


@pytest.mark.parametrize("statistic", [position_information, unexplained_information])
def test_heads_are_ranked(statistic):
    weights = torch.rand(3, 4, 5, 5, generator=torch.Generator().manual_seed(0)).pow(3)
    values = statistic(weights)
    everything = rank_heads(values)
    assert len(everything) == 12
    assert [one.value for one in everything] == sorted(values.flatten().tolist(), reverse=True)
    assert everything[0].value == values[everything[0].layer, everything[0].head].item()
    assert {one.layer for one in rank_heads(values, layer=1)} == {1}
    assert [(one.layer, one.head) for one in rank_heads(values, layer=1, head=2)] == [(1, 2)]
    assert len(rank_heads(values, head=0)) == 3


def test_equals_are_ranked_in_order():
    ranking = rank_heads(unexplained_information(torch.full((2, 2, 3, 3), 1 / 3)))
    assert [(one.layer, one.head) for one in ranking] == [(0, 0), (0, 1), (1, 0), (1, 1)]
