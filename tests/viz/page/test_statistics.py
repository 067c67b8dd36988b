"""The statistics of a page are like any other: results for different rows merge in any order."""

import pytest
import torch
from tests.mechanisms.recurrence_definitions import RULES
from tests.viz.page.layer_kinds import attention

from saccade import masks
from saccade.statistics import MatrixInfo
from saccade.viz.page.page_statistics import PooledColumns, StrongestPairs

CUTS = (range(3), range(3, 4), range(4, 12))


def matrices():
    q, k = torch.randn(2, 2, 12, 4, dtype=torch.float64), torch.randn(2, 2, 12, 4, dtype=torch.float64)
    return {"softmax": attention(12, 17, masks.Causal()), "delta": RULES["delta"](q, k, mask=masks.Causal())}


def state_of(statistic, matrix, rows):
    state = statistic.start(MatrixInfo.of(matrix))
    for block in matrix.blocks(rows=rows):
        state = statistic.add(state, block)
    return state


def sorted_weights(answer):
    """Lists of weights in an order that says nothing of how they came together."""
    if isinstance(answer, torch.Tensor):
        return [answer]
    return [answer.weights.abs().sort(-1).values, answer.received.abs().sort(-1).values]


@pytest.mark.parametrize("name", ["softmax", "delta"])
@pytest.mark.parametrize(
    "statistic",
    [
        StrongestPairs(1),
        StrongestPairs(3),
        StrongestPairs(40),
        PooledColumns(5, ((0, 2), (), (9,))),
        PooledColumns(99, ((1,),)),
    ],
)
def test_states_of_different_rows_merge_in_any_order(statistic, name):
    matrix = matrices()[name]
    whole = sorted_weights(matrix.compute(statistic)[0])
    a, b, c = (state_of(statistic, matrix, rows) for rows in CUTS)
    nothing = statistic.start(MatrixInfo.of(matrix))
    for merged in (
        statistic.merge(statistic.merge(a, b), c),
        statistic.merge(statistic.merge(nothing, c), statistic.merge(b, a)),
    ):
        for got, want in zip(sorted_weights(statistic.finish(merged)), whole, strict=True):
            torch.testing.assert_close(got, want)
    if isinstance(statistic, StrongestPairs):
        found, dense = statistic.finish(statistic.merge(statistic.merge(c, a), b)), matrix.to_dense()
        for weights, names, lines in ((found.weights, found.keys, dense), (found.received, found.queries, dense.mT)):
            there = names >= 0
            torch.testing.assert_close(lines.gather(-1, names.clamp_min(0))[there], weights[there])
            assert not weights[~there].any()
