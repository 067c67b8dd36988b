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
from saccade.statistics import Places

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
QUESTIONS: dict[str, Callable[[sc.AttentionMatrix, Places | None], statistics.Fold]] = {
    "Distance": lambda A, places: statistics.Distance(places),
    "Entropy": lambda A, places: statistics.Entropy(),
    "PositionInformation": lambda A, places: statistics.PositionInformation(),
    "LagProfile": lambda A, places: statistics.LagProfile(places),
    "LargestLogit": lambda A, places: statistics.LargestLogit(A.lse),
    "LogitVariance": lambda A, places: statistics.LogitVariance(),
    "InductionMass": lambda A, places: statistics.InductionMass((1,) * A.shape[3]),
    "LagMass": lambda A, places: statistics.LagMass(0, places),
    "LocalMass": lambda A, places: statistics.LocalMass(1, places),
    "SinkMass": lambda A, places: statistics.SinkMass(1),
    "Parts": lambda A, places: statistics.Parts(1, 2, 1, 2, places),
    "Coverage": lambda A, places: statistics.Coverage((0.5,)),
    "LargestWeight": lambda A, places: statistics.LargestWeight(),
    "SquaredNorm": lambda A, places: statistics.SquaredNorm(),
    "Pooled": lambda A, places: statistics.Pooled(2),
    "Received": lambda A, places: statistics.Received(),
    "IndexerLoss": lambda A, places: statistics.IndexerLoss(torch.zeros(A.shape[0], 1, *A.shape[2:])),
    "TopK": lambda A, places: statistics.TopK(2),
}


def test_no_statistic_is_left_out() -> None:
    folds = {
        name
        for name in statistics.__all__
        if isinstance(found := getattr(statistics, name), type) and issubclass(found, statistics.Fold)
    }
    assert folds - {"Fold", "PerRow"} == set(QUESTIONS)


@pytest.mark.usefixtures("either_way")
@pytest.mark.parametrize("where", sampled(POSITIONS, 3))
@pytest.mark.parametrize("bias", [None, ALiBi(2)], ids=["plain", "biased"])
@pytest.mark.parametrize("name", QUESTIONS)
@pytest.mark.parametrize("is_placed", [False, True], ids=["by index", "by place"])
def test_it_is_answered(where: str, bias: ALiBi | None, name: str, is_placed: bool) -> None:
    q, kv = (torch.tensor(x, dtype=torch.int64) for x in POSITIONS[where])
    query, key = torch.randn(2, 2, q.shape[-1], 4), torch.randn(2, 2, kv.shape[-1], 4)
    matrix = sc.AttentionMatrix(query, key, masks.Causal(), bias=bias, q_positions=q, kv_positions=kv)
    (answer,) = matrix.ask(QUESTIONS[name](matrix, Places.of(matrix) if is_placed else None))
    for part in answer if isinstance(answer, tuple) else (answer,):
        assert not isinstance(part, Tensor) or not part.isnan().any()
    if name == "LagProfile":
        seeing = (matrix.lse > -math.inf).sum(-1)
        torch.testing.assert_close(answer.sums.sum(-1), seeing.float())
