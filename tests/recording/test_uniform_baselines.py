"""Baselines of recorded statistics: exact for every mask, and computed once for equal masks."""

import pytest
import torch
from tests.statistics.dense_matrices import EVERY, matrix_of

import saccade as sc
from saccade import masks
from saccade.matrix import GradientMatrix
from saccade.recording.uniform_baselines import UniformBaselines
from saccade.statistics import Distance, Entropy, LargestLogit, LargestWeight, Received, TopK, positions_of


@pytest.mark.parametrize("case", [case for case in EVERY if case.q_len and case.kv_len], ids=str)
def test_they_are_those_of_the_whole_matrix(case):
    matrix = matrix_of(case)
    statistics = (TopK(2), LargestWeight(), Received(), Distance(positions_of(matrix)), LargestLogit())
    found, sees = UniformBaselines().of(matrix, statistics)
    assert found[0] is found[4] is None
    for statistic, one in zip(statistics[1:4], found[1:4], strict=True):
        torch.testing.assert_close(one, statistic.uniform(matrix))
    torch.testing.assert_close(sees, matrix.uniform().to_dense().sum(-1) > 0)


def test_layers_with_equal_masks_share_one(monkeypatch):
    baselines, computed = UniformBaselines(), []
    whole = sc.AttentionMatrix.compute
    monkeypatch.setattr(
        sc.AttentionMatrix, "compute", lambda self, *all_: computed.append(self.shape) or whole(self, *all_)
    )
    x = torch.randn(2, 3, 6, 4)
    for rule in (masks.Causal(), masks.Causal(), masks.Window(1, 0), masks.Causal()):
        for scale in (1.0, 2.0):
            baselines.of(sc.AttentionMatrix(scale * x, x, rule), [Received()])
    assert computed == [(1, 1, 6, 6), (1, 1, 6, 6)]
    baselines.of(sc.AttentionMatrix(x, x, masks.Padding((6, 3))), [Received()])
    assert computed[-1] == (2, 1, 6, 6)


def test_a_mask_that_is_written_to_is_read_again():
    x, allowed, baselines = torch.randn(1, 1, 2, 4), torch.ones(2, 2, dtype=torch.bool), UniformBaselines()
    assert baselines.of(sc.AttentionMatrix(x, x, allowed), [Received()])[0][0].tolist() == [[[1.0, 1.0]]]
    allowed[:, 1] = False
    assert baselines.of(sc.AttentionMatrix(x, x, allowed), [Received()])[0][0].tolist() == [[[2.0, 0.0]]]


def test_a_function_is_asked_again():
    x, baselines, last = torch.randn(1, 1, 2, 4), UniformBaselines(), [1]
    rule = masks.Predicate(lambda b, h, q, kv: kv <= last[0])
    assert baselines.of(sc.AttentionMatrix(x, x, rule), [Received()])[0][0].tolist() == [[[1.0, 1.0]]]
    last[0] = 0
    assert baselines.of(sc.AttentionMatrix(x, x, rule), [Received()])[0][0].tolist() == [[[2.0, 0.0]]]


def test_few_masks_are_remembered():
    x, baselines = torch.randn(1, 1, 20, 4), UniformBaselines()
    for width in range(12):
        baselines.of(sc.AttentionMatrix(x, x, masks.Window(width, 0)), [Received()])
    assert len(baselines._known) == 8


def test_what_has_no_mask_has_none():
    x = torch.randn(1, 1, 2, 4)
    assert UniformBaselines().of(GradientMatrix(x, x), [Received()]) == ((None,), None)


@pytest.mark.parametrize("keep", ["qk", "statistics"])
@pytest.mark.parametrize("what", ["compute", "uniform"])
@pytest.mark.parametrize("statistic", ["entropy", Entropy])
def test_only_instances_of_statistics_are_taken(keep, what, statistic):
    model = sc.nn.MultiHeadAttention(16, 2)
    with torch.no_grad(), sc.record(model, keep=keep) as recording:
        model(torch.randn(1, 5, 16))
    for one, name in ((recording, "Recording"), (recording[0], "Run")):
        with pytest.raises(TypeError, match=rf"^{name}.{what}: statistics must be instances of saccade.statistics"):
            getattr(one, what)(statistic)
