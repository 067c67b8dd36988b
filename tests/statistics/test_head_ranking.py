"""Tests of the ranking of heads, by numbers that can be checked by hand."""

from math import log

import pytest
import torch

from saccade.statistics.head_ranking import position_information, rank_heads, unexplained_information


def test_position_information_of_known_heads():
    uniform, sink, diagonal = torch.full((4, 4), 0.25), torch.eye(4)[:1].expand(4, 4), torch.eye(4)
    values = position_information(torch.stack([uniform, sink, diagonal]))
    torch.testing.assert_close(values, torch.tensor([0, 0, log(4)], dtype=torch.float64))


def test_position_information_by_hand():
    weights = torch.tensor([[0.5, 0.5], [1.0, 0.0]])
    mean, rows = -0.75 * log(0.75) - 0.25 * log(0.25), log(2) / 2
    assert position_information(weights).item() == pytest.approx(mean - rows)


def test_rows_are_scaled_and_empty_rows_do_not_count():
    weights = torch.tensor([[0.25, 0.25], [0.01, 0.0]])
    expected = position_information(torch.tensor([[0.5, 0.5], [1.0, 0.0]]))
    torch.testing.assert_close(position_information(weights), expected)
    with_empty = torch.cat([weights, torch.zeros(1, 2)])
    torch.testing.assert_close(position_information(with_empty), expected)
    assert position_information(torch.zeros(3, 3)).item() == 0
    assert unexplained_information(torch.zeros(3, 3)).item() == 0


def test_neither_a_sink_nor_the_word_before_is_unexplained():
    previous = torch.eye(6).roll(-1, 1)
    previous[-1] = previous[0]
    sink = torch.eye(6)[:1].expand(6, 6)
    assert unexplained_information(torch.eye(6)).item() == pytest.approx(0)
    assert unexplained_information(sink).item() == pytest.approx(0)
    content = torch.eye(6)[[3, 0, 5, 2, 1, 4]]
    assert unexplained_information(content).item() > 0.3
    assert position_information(content).item() == pytest.approx(position_information(torch.eye(6)).item())


def test_unexplained_information_by_hand_and_by_its_share():
    weights = torch.tensor([[0.5, 0.5], [1.0, 0.0]])
    # mean row (0.75, 0.25); mean at distance -1, 0, 1: 1, 0.25, 0.5; expected row 0 is (3, 2) / 5, row 1 (12, 1) / 13
    expected = (0.5 * log(0.5 / 0.6) + 0.5 * log(0.5 / 0.4) + log(13 / 12)) / 2
    assert unexplained_information(weights).item() == pytest.approx(expected)
    assert unexplained_information(weights / 4).item() == pytest.approx(expected / 4)


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
