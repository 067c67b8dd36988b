"""The information in a head's attention, by numbers that can be checked by hand."""

from math import log

import pytest
import torch

from saccade.statistics.information import position_information, unexplained_information


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
