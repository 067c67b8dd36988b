"""The uniform baseline of every statistic is that statistic of even rows over the pairs that the mask allows."""

import pytest
import torch
from tests.sampled import sampled
from tests.statistics.dense_matrices import EVERY, matrix_of
from torch import Tensor

import saccade as sc
from saccade import masks
from saccade.matrix import DenseMatrix, GradientMatrix
from saccade.mechanisms import Delta, Linear
from saccade.recording.derived_matrices import ChosenHeads, JoinedMatrices
from saccade.statistics import (
    Coverage,
    Entropy,
    InductionMass,
    LagProfile,
    LargestLogit,
    LargestWeight,
    Parts,
    Pooled,
    PositionInformation,
    Received,
    positions_of,
)
from saccade.statistics.statistic import compute_from_weights
from saccade.testing import Case

# Cases whose mask is also known as a function of integers.
KNOWN = [case for case in EVERY if case.q_len and case.kv_len and (case.rule is not None or case.mask is None)]


def even_rows(case: Case) -> Tensor:
    """Return even rows over the pairs that the case's function of integers allows, in float64."""
    given = case.problem(torch.float64).positions
    q, kv = given.get("q_positions"), given.get("kv_positions")

    def at(positions: object, item: int, first: int, length: int) -> list[int]:
        if positions is None:
            return list(range(first, first + length))
        table = torch.tensor(positions) if isinstance(positions, range) else positions
        return table.expand(case.batch, length)[item].tolist()

    out = torch.zeros(case.batch, case.num_heads, case.q_len, case.kv_len, dtype=torch.float64)
    for b in range(case.batch):
        rows, columns = at(q, b, case.kv_len - case.q_len, case.q_len), at(kv, b, 0, case.kv_len)
        for h in range(case.num_heads):
            for i, row in enumerate(rows):
                for j, column in enumerate(columns):
                    is_token = (q is None or row >= 0) and (kv is None or column >= 0)
                    out[b, h, i, j] = is_token and (case.rule is None or case.rule(b, h, row, column))
    return out / out.sum(-1, keepdim=True).clamp_min(1.0)


@pytest.mark.parametrize("case", sampled(KNOWN, 8), ids=str)
def test_weights_are_even_over_what_the_mask_allows(case):
    matrix = matrix_of(case)
    torch.testing.assert_close(matrix.uniform().to_dense(), even_rows(case), rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("case", sampled([case for case in KNOWN if case.q_len <= case.kv_len], 8), ids=str)
def test_every_statistic_has_the_value_of_even_rows(case):
    matrix, dense = matrix_of(case), even_rows(case)
    where = positions_of(matrix)
    tokens = tuple(torch.randint(3, (case.kv_len,), generator=torch.Generator().manual_seed(1)).tolist())
    statistics = [Entropy(), LargestWeight(), Received(), PositionInformation(), Coverage(), Pooled(3)]
    statistics += [InductionMass(tokens), Parts(1, 2, 1, 2, where)]
    for statistic in statistics:
        want = compute_from_weights(dense, statistic)[0]
        torch.testing.assert_close(statistic.uniform(matrix), want, rtol=1e-9, atol=1e-9)
    profile = LagProfile(where)
    torch.testing.assert_close(profile.uniform(matrix).sums, compute_from_weights(dense, profile)[0].sums)


def test_induction_in_a_causal_text_counts_followers():
    x = torch.randn(1, 1, 5, 4)
    matrix = sc.AttentionMatrix(x, x, masks.Causal())
    baseline = InductionMass((7, 8, 9, 7, 8)).uniform(matrix)
    torch.testing.assert_close(baseline, torch.tensor([[[0, 0, 0, 1 / 4, 1 / 5]]]))


def test_a_bias_a_sink_and_a_softcap_do_not_count():
    q, k = torch.randn(1, 2, 6, 4), torch.randn(1, 2, 6, 4)
    bias, sink = torch.randn(1, 2, 6, 6), torch.randn(2)
    matrix = sc.AttentionMatrix(q, k, masks.Causal(), bias=bias, softcap=2.0, sink_logit=sink)
    want = torch.tril(torch.ones(6, 6)) / torch.arange(1.0, 7)[:, None]
    torch.testing.assert_close(matrix.uniform().to_dense(), want.expand(1, 2, 6, 6))
    assert matrix.uniform().is_stochastic


def test_half_precision_has_an_exact_baseline():
    x = torch.randn(1, 1, 700, 8, dtype=torch.bfloat16)
    received = Received().uniform(sc.AttentionMatrix(x, x))
    assert received.dtype == torch.float32
    torch.testing.assert_close(received, torch.ones(1, 1, 700), rtol=1e-6, atol=1e-6)


def test_a_dense_mask_that_changes_is_read_when_the_baseline_is():
    x, mask = torch.randn(1, 1, 2, 4), torch.ones(2, 2, dtype=torch.bool)
    uniform = sc.AttentionMatrix(x, x, mask).uniform()
    mask[0, 1] = False
    torch.testing.assert_close(uniform.to_dense()[0, 0], torch.tensor([[1.0, 0.0], [0.5, 0.5]]))


@pytest.mark.parametrize("mechanism", [Linear(), Linear("relu"), Delta()], ids=["linear", "relu", "delta"])
def test_linear_matrices_read_their_mask_and_not_their_weights(mechanism):
    q, k = torch.randn(2, 2, 9, 4), torch.nn.functional.normalize(torch.randn(2, 2, 9, 4), dim=-1)
    options = {"beta": torch.rand(2, 2, 9)} if isinstance(mechanism, Delta) else {}
    matrix = mechanism(q, k, mask=masks.Causal() & masks.Padding((9, 5)), **options)
    allowed = torch.ones(9, 9).tril() * (torch.arange(9) < torch.tensor([9, 5])[:, None])[:, None, None]
    want = allowed / allowed.sum(-1, keepdim=True)
    torch.testing.assert_close(matrix.uniform().to_dense(), want.expand(2, 2, 9, 9))


def test_a_matrix_without_a_mask_sees_where_its_weights_are_not_0():
    weights = torch.tensor([[[[0.9, 0.1, 0.0], [0.0, 0.0, 0.0], [0.2, 0.3, 0.5]]]])
    want = torch.tensor([[0.5, 0.5, 0.0], [0.0, 0.0, 0.0], [1 / 3, 1 / 3, 1 / 3]])
    torch.testing.assert_close(DenseMatrix(weights).uniform().to_dense()[0, 0], want)


def test_recorded_parts_read_their_masks():
    x = 40 * torch.randn(1, 3, 6, 4)  # most weights underflow to 0, and their keys stay visible
    whole = sc.AttentionMatrix(x, x, masks.Causal())
    prompt = sc.AttentionMatrix(x[:, :, :4], x[:, :, :4], masks.Causal())
    step = sc.AttentionMatrix(x[:, :, 4:], x, masks.Causal())
    want = whole.uniform().to_dense()
    assert (whole.to_dense() == 0).sum() > (want == 0).sum()
    torch.testing.assert_close(JoinedMatrices([prompt, step], [0, 0]).uniform().to_dense(), want)
    torch.testing.assert_close(ChosenHeads(whole, [2, 0]).uniform().to_dense(), want[:, [2, 0]])


def test_what_has_no_baseline_says_why():
    x = torch.randn(1, 1, 3, 4)
    with pytest.raises(sc.UnsupportedError, match="GradientMatrix has no mask"):
        GradientMatrix(x, x).uniform()
    with pytest.raises(sc.UnsupportedError, match="the largest of them is unknown"):
        LargestLogit().uniform(sc.AttentionMatrix(x, x))
