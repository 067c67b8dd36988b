"""A summary tells every head's statistics beside what uniform attention over the same keys would have."""

import math

import pytest
import torch
from tests.statistics.dense_matrices import EVERY, dense_of, lags_of, matrix_of
from torch import Tensor

import saccade as sc
from saccade import masks
from saccade.mechanisms import Linear, Linformer
from saccade.statistics import Summary
from saccade.statistics.summary import summary_of
from saccade.testing import LARGE_CASES, Case


def entropy(p: Tensor) -> Tensor:
    return -torch.where(p > 0, p * p.clamp_min(1e-300).log(), 0.0).sum(-1)


def means(p: Tensor, lags: Tensor, kv: Tensor) -> dict[str, Tensor]:
    """Every measure of weights that are there, ``[batch, heads]``: means over the queries that see something."""
    sees, visible = p.sum(-1) > 0, (p > 0).sum(-1).double()
    count = sees.sum(-1)

    def mean(x: Tensor, over: Tensor = sees) -> Tensor:
        return torch.where(over, x, 0.0).sum(-1) / over.sum(-1)

    bar = p.sum(-2) / count[..., None]
    return {
        "entropy": mean(entropy(p)),
        "relative_entropy": mean(entropy(p) / visible.log(), visible > 1),
        "effective_tokens": mean(entropy(p).exp()),
        "largest_weight": mean(p.amax(-1)),
        "first_mass": mean((p * (kv == 0)).sum(-1)),
        "first_4_mass": mean((p * ((kv >= 0) & (kv < 4))).sum(-1)),
        "self_mass": mean((p * (lags == 0)).sum(-1)),
        "previous_mass": mean((p * (lags == 1)).sum(-1)),
        "local_mass": mean((p * (lags.abs() <= 16)).sum(-1)),
        "distance": mean((p * lags.abs()).sum(-1)),
        "position_information": torch.where(count > 0, entropy(bar) - mean(entropy(p)), torch.nan),
        "frobenius_norm": torch.where(count > 0, (p * p).sum((-1, -2)).sqrt(), torch.nan),
    }


def even(p: Tensor) -> Tensor:
    """Uniform attention over the same keys."""
    seen = (p > 0).double()
    return seen / seen.sum(-1, keepdim=True).clamp_min(1)


def check(summary: Summary, dense: Tensor, lags: Tensor, kv: Tensor) -> None:
    close = {"rtol": 1e-10, "atol": 1e-10, "equal_nan": True}
    own, uniform = means(dense, lags, kv), means(even(dense), lags, kv)
    known = {measure.name for measure in summary.measures}
    for name in own.keys() & known:
        torch.testing.assert_close(summary.named(name).values, own[name], msg=lambda m, n=name: f"{n}: {m}", **close)
        want = uniform[name]
        torch.testing.assert_close(
            summary.named(name).uniform, want, msg=lambda m, n=name: f"uniform {n}: {m}", **close
        )
    torch.testing.assert_close(summary.received, dense.sum(-2), **close)
    expected = even(dense).sum(-2)
    index = torch.where(expected > 0, dense.sum(-2) / expected, 0.0)
    torch.testing.assert_close(summary.received_index, index, **close)
    most, key = dense.sum(-2).max(-1)
    count = (dense.sum(-1) > 0).sum(-1)
    measure = summary.named("most_received")
    torch.testing.assert_close(measure.values, most / count, **close)
    torch.testing.assert_close(measure.uniform, expected.gather(-1, key[..., None])[..., 0] / count, **close)


@pytest.mark.ci
@pytest.mark.parametrize("case", [*EVERY, *LARGE_CASES], ids=str)
def test_a_summary_is_what_its_measures_are_defined_to_be(case: Case) -> None:
    matrix, dense = matrix_of(case), dense_of(case)
    summary = matrix.summary()
    lags, kv = lags_of(case)
    check(summary, dense, lags, kv)
    names = [measure.name for measure in summary.measures]
    largest = (dense.amax(-1).log() + case.problem(torch.float64).truth()[1]).amax(-1)
    found = summary.named("largest_logit").values
    torch.testing.assert_close(found, largest.masked_fill(largest == -math.inf, math.nan), equal_nan=True)
    assert ("entropy" in names) == matrix.is_stochastic
    assert ("given_mass" in names) != matrix.is_stochastic
    assert len(str(summary).splitlines()) == len(names) + 1
    if not matrix.is_stochastic:
        given = summary.named("given_mass").values
        want = dense.sum((-1, -2)) / (dense.sum(-1) > 0).sum(-1)
        torch.testing.assert_close(given, want, rtol=1e-10, atol=1e-10, equal_nan=True)


@pytest.mark.parametrize("case", [case for case in EVERY if not case.sink], ids=str)
def test_visible_keys_are_counted_without_a_mask(case: Case) -> None:
    matrix, dense = matrix_of(case), dense_of(case)
    check(summary_of(matrix), dense, *lags_of(case))


def test_long_triangles_are_counted_in_pieces() -> None:
    x = torch.zeros(1, 1, 1300, 4, dtype=torch.float64)
    summary = sc.AttentionMatrix(x, x, masks.Causal()).summary()
    assert torch.equal(summary.uniform.visible[0, 0], torch.arange(1, 1301, dtype=torch.float64))
    assert torch.equal(summary.uniform.distance[0, 0], torch.arange(1300, dtype=torch.float64) / 2)
    torch.testing.assert_close(summary.received_index, torch.ones(1, 1, 1300, dtype=torch.float64))
    for measure in summary.measures:
        if not measure.uniform.isnan().any():
            torch.testing.assert_close(measure.values, measure.uniform, rtol=1e-9, atol=1e-9)


@pytest.mark.usefixtures("either_way")
def test_float32_is_close_too() -> None:
    torch.manual_seed(0)
    q, k = torch.randn(1, 4, 500, 16), torch.randn(1, 2, 500, 16)
    small = sc.AttentionMatrix(q, k, masks.Causal()).summary()
    large = sc.AttentionMatrix(q.double(), k.double(), masks.Causal()).summary()
    for one, other in zip(small.measures, large.measures, strict=True):
        close = {"rtol": 1e-4, "atol": 1e-4, "equal_nan": True, "check_dtype": False}
        torch.testing.assert_close(one.values, other.values, **close)
        torch.testing.assert_close(one.uniform, other.uniform, **close)
        assert one.values.dtype == torch.float32


@pytest.mark.usefixtures("either_way")
def test_a_head_whose_queries_see_nothing_has_no_statistics() -> None:
    x = torch.randn(2, 2, 5, 4)
    mask = torch.ones(2, 1, 5, 5, dtype=torch.bool)
    mask[1] = False
    summary = sc.AttentionMatrix(x, x, mask).summary()
    for measure in summary.measures:
        assert measure.values[1].isnan().all(), measure.name
        assert not measure.values[0].isnan().any(), measure.name
    assert "nan" not in str(summary)
    assert "–" in str(summary)


def test_the_largest_logit_is_that_of_the_head() -> None:
    q, k = torch.randn(1, 3, 40, 8, dtype=torch.float64), torch.randn(1, 3, 50, 8, dtype=torch.float64)
    scores = (q @ k.mT * 8**-0.5).masked_fill(~masks.Causal().to_dense(40, 50), -math.inf)
    summary = sc.AttentionMatrix(q, k, masks.Causal()).summary()
    torch.testing.assert_close(summary.named("largest_logit").values, scores.amax((-1, -2)))
    assert summary.named("largest_logit").uniform.isnan().all()


def test_a_table_names_the_extremes_of_many_heads() -> None:
    q = torch.randn(2, 8, 30, 4) * torch.arange(1, 9)[:, None, None]
    summary = sc.AttentionMatrix(q, torch.randn(2, 8, 30, 4)).summary()
    head, *lines = str(summary).splitlines()
    assert head.split() == ["unit", "least", "mean", "most", "uniform"]
    cells = next(line for line in lines if line.startswith("entropy")).split()
    values = summary.named("entropy").values
    least, most = (divmod(int(i), 8) for i in (values.argmin(), values.argmax()))
    assert cells[3:5] == [f"b{least[0]}", f"h{least[1]}"]
    assert cells[7:9] == [f"b{most[0]}", f"h{most[1]}"]
    assert float(cells[2]) == pytest.approx(values.min().item(), rel=1e-3)


def test_few_heads_each_have_a_column() -> None:
    x = torch.zeros(1, 2, 4, 4)
    lines = str(sc.AttentionMatrix(x, x, masks.Causal()).summary()).splitlines()
    assert lines[0].split() == ["unit", "h0", "h1", "uniform"]
    assert next(line for line in lines if line.startswith("effective")).split()[1:] == ["keys", "2.5", "2.5", "2.5"]


def test_no_measure_of_another_name() -> None:
    x = torch.zeros(1, 1, 2, 2)
    with pytest.raises(KeyError, match=r"Summary: name must be one of entropy, .*; got entropie"):
        sc.AttentionMatrix(x, x).summary().named("entropie")


def test_other_mechanisms_have_a_summary_if_their_rows_are_distributions() -> None:
    q, k = torch.randn(1, 2, 9, 4, dtype=torch.float64), torch.randn(1, 2, 9, 4, dtype=torch.float64)
    matrix = Linear()(q, k, mask=masks.Causal())
    dense = matrix.to_dense()
    lags = torch.arange(9)[:, None] - torch.arange(9)
    check(matrix.summary(), dense, lags, torch.arange(9))


def test_rows_that_are_no_distributions_are_refused_with_the_reason() -> None:
    q, k = torch.randn(1, 1, 9, 4), torch.randn(1, 1, 9, 4)
    torch.manual_seed(0)
    matrix = Linformer(9, 3)(q, k)
    matrix = matrix if not matrix.is_stochastic else Linear(eps=0.1)(q, k)
    with pytest.raises(sc.UnsupportedError, match="do not sum to 1"):
        matrix.summary()


@pytest.mark.parametrize("case", EVERY, ids=str)
def test_a_sparse_tensor_holds_what_is_not_0(case: Case) -> None:
    matrix, dense = matrix_of(case), dense_of(case)
    sparse = matrix.to_sparse()
    assert sparse.is_coalesced()
    assert sparse.values().numel() == int((dense > 0).sum())
    torch.testing.assert_close(sparse.to_dense(), dense)


def test_a_sparse_tensor_of_too_many_is_refused() -> None:
    x = torch.zeros(1, 1, 10, 4)
    matrix = sc.AttentionMatrix(x, x, masks.Causal())
    assert matrix.to_sparse(limit=55)._nnz() == 55
    with pytest.raises(ValueError, match=r"Matrix.to_sparse: size must be at most 54 weights; got more"):
        matrix.to_sparse(limit=54)
    with pytest.raises(TypeError, match=r"Matrix.to_sparse: limit must be an int; got 1000000.0"):
        matrix.to_sparse(limit=1e6)


@pytest.mark.usefixtures("either_way")
def test_a_summary_of_padded_texts_is_that_of_each_text() -> None:
    torch.manual_seed(0)
    x = 4 * torch.randn(2, 2, 600, 8)
    lengths, bare = (590, 200), x.clone()
    bare[1, :, :400] *= 9  # padding may hold anything
    mask = masks.Padding(lengths, side="left", padded_len=600)
    together = sc.AttentionMatrix(x, bare, mask).summary()
    for item, length in enumerate(lengths):
        alone = sc.AttentionMatrix(x[item, None], bare[item, None, :, 600 - length :]).summary()
        for name in ("entropy", "largest_weight", "largest_logit", "logit_variance", "frobenius_norm"):
            torch.testing.assert_close(together.named(name).values[item], alone.named(name).values[0])


@pytest.mark.usefixtures("either_way")
def test_the_largest_logit_is_known_where_the_first_key_is_far_below() -> None:
    q, k = torch.tensor([[1.0]])[None, None], torch.tensor([[-5000.0], [3.0], [1.0]])[None, None]
    summary = sc.AttentionMatrix(q, k, scale=1.0).summary()
    assert summary.named("largest_logit").values.item() == pytest.approx(3.0)
