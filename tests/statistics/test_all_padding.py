"""Every statistic of matrices in which some item, or all of them, holds no token, or which are empty."""

import math
from collections.abc import Callable

import pytest
import torch
from tests.sampled import sampled
from torch import Tensor

import saccade as sc
from saccade import masks, statistics
from saccade.positions import ALiBi
from saccade.statistics import positions_of
from saccade.statistics.per_row import PositionPair

NONE = -1
POSITIONS = {
    "no query": ([NONE] * 4, [0, 1, 2, 3, 4]),
    "no key": ([0, 1, 2, 3], [NONE] * 5),
    "neither": ([NONE] * 4, [NONE] * 5),
    "one query, one key": ([NONE], [NONE]),
    "an item without queries": ([[0, 1, 2, 3], [NONE] * 4], [[0, 1, 2, 3, 4], [0, 1, NONE, NONE, NONE]]),
    "an item without keys": ([[0, 1, 2, 3]] * 2, [[0, 1, 2, 3, 4], [NONE] * 5]),
    "an item without either": ([[NONE] * 4, [0, 1, 2, 3]], [[NONE] * 5, [0, 1, 2, 3, 4]]),
    "no item": ([[NONE] * 4] * 2, [[NONE] * 5] * 2),
    "length 0 of queries": ([], [0, 1, 2]),
    "length 0 of keys": ([0, 1, 2], []),
    "length 0": ([], []),
}
QUESTIONS: dict[str, Callable[[sc.AttentionMatrix, PositionPair | None], statistics.Statistic]] = {
    "Distance": lambda A, positions: statistics.Distance(positions),
    "Entropy": lambda A, positions: statistics.Entropy(),
    "PositionInformation": lambda A, positions: statistics.PositionInformation(),
    "LagProfile": lambda A, positions: statistics.LagProfile(positions),
    "LargestLogit": lambda A, positions: statistics.LargestLogit(A.lse),
    "LogitVariance": lambda A, positions: statistics.LogitVariance(),
    "InductionMass": lambda A, positions: statistics.InductionMass((1,) * A.shape[3]),
    "LagMass": lambda A, positions: statistics.LagMass(0, positions),
    "LocalMass": lambda A, positions: statistics.LocalMass(1, positions),
    "SinkMass": lambda A, positions: statistics.SinkMass(1),
    "Parts": lambda A, positions: statistics.Parts(1, 2, 1, 2, positions),
    "Coverage": lambda A, positions: statistics.Coverage((0.5,)),
    "LargestWeight": lambda A, positions: statistics.LargestWeight(),
    "SquaredNorm": lambda A, positions: statistics.SquaredNorm(),
    "Pooled": lambda A, positions: statistics.Pooled(2),
    "Received": lambda A, positions: statistics.Received(),
    "IndexerLoss": lambda A, positions: statistics.IndexerLoss(torch.zeros(A.shape[0], 1, *A.shape[2:])),
    "TopK": lambda A, positions: statistics.TopK(2),
}


def test_no_statistic_is_left_out() -> None:
    questions = {
        name
        for name in statistics.__all__
        if isinstance(found := getattr(statistics, name), type) and issubclass(found, statistics.Statistic)
    }
    assert questions - {"Statistic", "PerRow"} == set(QUESTIONS)


@pytest.mark.usefixtures("either_way")
@pytest.mark.parametrize("where", sampled(POSITIONS, 3))
@pytest.mark.parametrize("bias", [None, ALiBi(2)], ids=["plain", "biased"])
@pytest.mark.parametrize("name", QUESTIONS)
@pytest.mark.parametrize("is_placed", [False, True], ids=["by index", "by place"])
def test_it_is_answered(where: str, bias: ALiBi | None, name: str, is_placed: bool) -> None:
    q, kv = (torch.tensor(x, dtype=torch.int64) for x in POSITIONS[where])
    query, key = torch.randn(2, 2, q.shape[-1], 4), torch.randn(2, 2, kv.shape[-1], 4)
    matrix = sc.AttentionMatrix(query, key, masks.Causal(), bias=bias, q_positions=q, kv_positions=kv)
    (answer,) = matrix.compute(QUESTIONS[name](matrix, positions_of(matrix) if is_placed else None))
    for part in answer if isinstance(answer, tuple) else (answer,):
        assert not isinstance(part, Tensor) or not part.isnan().any()
    if name == "LagProfile":
        seeing = (matrix.lse > -math.inf).sum(-1)
        torch.testing.assert_close(answer.sums.sum(-1), seeing.float())
