"""Tests of statistics that take several passes: singular values, stable rank, distances of heads, rollout."""

import pytest
import torch
from tests.statistics.dense_matrices import EVERY, dense_of, matrix_of
from torch import Tensor

import saccade as sc
from saccade import masks
from saccade.mechanisms import Linear
from saccade.statistics import head_distances, rollout, singular_values, stable_rank


def heads_of(n: int, dtype: torch.dtype, sharpness: float = 1.0) -> sc.AttentionMatrix:
    torch.manual_seed(n)
    q, k = sharpness * torch.randn(2, 4, n, 8, dtype=dtype), torch.randn(2, 2, n, 8, dtype=dtype)
    return sc.AttentionMatrix(q, k, masks.Causal())


@pytest.mark.parametrize("dtype, slack", [(torch.float64, 1e-10), (torch.float32, 2e-5)])
@pytest.mark.parametrize("n, sharpness", [(40, 1.0), (160, 3.0)])
def test_singular_values_are_within_their_residuals(n, sharpness, dtype, slack) -> None:
    matrix = heads_of(n, dtype, sharpness)
    want = torch.linalg.svdvals(matrix.to_dense().double())[..., :3]
    spectrum = singular_values(matrix, 3, tolerance=1e-4)
    assert spectrum.values.shape == (2, 4, 3)
    assert spectrum.values.dtype == dtype
    assert ((spectrum.values.double() - want).abs() <= spectrum.residuals + slack).all()
    assert (spectrum.residuals <= 1e-4 * spectrum.values[..., :1]).all()
    assert spectrum.sweeps < 24


def test_few_sweeps_leave_large_residuals_that_are_true() -> None:
    matrix = heads_of(300, torch.float64, 3.0)
    want = torch.linalg.svdvals(matrix.to_dense())[..., :2]
    spectrum = singular_values(matrix, 2, tolerance=1e-9, max_sweeps=2)
    assert spectrum.sweeps == 2
    assert spectrum.residuals.max() > 1e-6
    nearest = (torch.linalg.svdvals(matrix.to_dense())[..., None, :] - spectrum.values[..., None]).abs().amin(-1)
    assert (nearest <= spectrum.residuals).all()
    assert (spectrum.values <= want + 1e-10).all()  # from below


@pytest.mark.parametrize("case", [case for case in EVERY if case.batch * case.num_heads <= 8], ids=str)
def test_any_mask_has_singular_values(case) -> None:
    want = torch.nn.functional.pad(torch.linalg.svdvals(dense_of(case)), (0, 1))[..., :2]
    spectrum = singular_values(matrix_of(case), 2, tolerance=1e-10)
    torch.testing.assert_close(spectrum.values, want, rtol=1e-6, atol=1e-6)


def test_known_spectra() -> None:
    x = torch.zeros(1, 1, 16, 4)
    own, before = sc.AttentionMatrix(x, x, masks.Window(0, 0)), sc.AttentionMatrix(x, x)
    sink = sc.AttentionMatrix(x, x, torch.arange(16)[None].expand(16, -1) == 0)
    for matrix, want in ((own, 1.0), (before, 1.0), (sink, 4.0)):
        assert singular_values(matrix).values.item() == pytest.approx(want, abs=1e-5)
    assert stable_rank(own).values.item() == pytest.approx(16.0, rel=1e-4)
    assert stable_rank(sink).values.item() == pytest.approx(1.0, rel=1e-4)


def test_stable_rank_is_within_its_residual() -> None:
    matrix = heads_of(120, torch.float64, 2.0)
    dense = matrix.to_dense()
    want = dense.square().sum((-1, -2)) / torch.linalg.svdvals(dense)[..., 0] ** 2
    got = stable_rank(matrix)
    assert ((got.values - want).abs() <= got.residuals + 1e-10).all()
    torch.testing.assert_close(got.values, want, rtol=1e-3, atol=0.0)


def test_nothing_has_no_rank() -> None:
    x = torch.randn(1, 2, 4, 4)
    nothing = sc.AttentionMatrix(x, x, torch.zeros(4, 4, dtype=torch.bool))
    assert not singular_values(nothing, 2).values.any()
    assert not stable_rank(nothing).values.any()
    empty = sc.AttentionMatrix(torch.ones(1, 2, 0, 4), x)
    assert singular_values(empty, 2).values.shape == (1, 2, 2)


def definition(p: Tensor, between: str) -> Tensor:
    a, b = p[:, :, None], p[:, None]
    if between == "frobenius":
        return (a - b).square().sum((-1, -2)).sqrt()
    if between == "total_variation":
        rows = (a - b).abs().sum(-1) / 2
    else:
        mean = (a + b) / 2
        rows = sum((x * (x.clamp_min(1e-300) / mean.clamp_min(1e-300)).log()).sum(-1) / 2 for x in (a, b))
    seeing = (a.sum(-1) > 0) | (b.sum(-1) > 0)
    return (rows * seeing).sum(-1) / seeing.sum(-1).clamp_min(1)


@pytest.mark.parametrize("between", ["jensen_shannon", "total_variation", "frobenius"])
@pytest.mark.parametrize("name", ["causal", "streaming", "padding-empty-item", "strided"])
def test_distances_of_heads_are_their_definition(name, between, monkeypatch) -> None:
    case = next(case for case in EVERY if case.name == name)
    want = definition(dense_of(case), between)
    torch.testing.assert_close(head_distances(matrix_of(case), between), want, rtol=1e-9, atol=1e-7)
    monkeypatch.setattr("saccade.statistics.head_similarity._ENTRIES", 50)
    torch.testing.assert_close(head_distances(matrix_of(case), between), want, rtol=1e-9, atol=1e-7)


def test_rollout_is_the_product_of_all_layers() -> None:
    layers = [heads_of(30, torch.float64, 1.0 + layer) for layer in range(3)]
    full = torch.eye(30, dtype=torch.float64)
    for matrix in layers:
        full = (0.3 * torch.eye(30) + 0.7 * matrix.to_dense().mean(1)) @ full
    got = rollout(layers, [0, 17, -1], residual=0.3)
    torch.testing.assert_close(got, full[:, [0, 17, 29]])
    torch.testing.assert_close(got.sum(-1), torch.ones(2, 3, dtype=torch.float64))


X = torch.zeros(1, 1, 4, 4)
A = sc.AttentionMatrix(X, X)


@pytest.mark.parametrize(
    "ask, error, message",
    [
        (lambda: singular_values(A, 0), ValueError, "singular_values: k must be an int of at least 1; got 0"),
        (lambda: singular_values(A, 1.0), TypeError, "singular_values: k must be an int of at least 1; got 1.0"),
        (
            lambda: singular_values(A, tolerance=0.0),
            ValueError,
            "singular_values: tolerance must be a finite number above 0; got 0",
        ),
        (
            lambda: singular_values(A, max_sweeps=0),
            ValueError,
            "singular_values: max_sweeps must be an int of at least 1; got 0",
        ),
        (lambda: head_distances(A, "l2"), ValueError, "head_distances: between must be one of 'jensen_shannon', "),
        (lambda: rollout([], [0]), ValueError, "rollout: matrices must contain one for each layer; got none"),
        (lambda: rollout([A], [4]), ValueError, "rollout: each of queries must be below 4; got 4"),
        (lambda: rollout([A], [0.5]), TypeError, "rollout: each of queries must be an int of at least -4; got 0.5"),
        (lambda: rollout([A], [0], residual=2), ValueError, "rollout: residual must be from 0 to 1; got 2"),
        (
            lambda: rollout([A, sc.AttentionMatrix(X[:, :, :2], X)], [0]),
            ValueError,
            r"rollout: matrices must all be \[1, heads, 4, 4\] in torch.float32, like the first; got \[1, 1, 2, 4\]",
        ),
    ],
)
def test_bad_arguments_are_named(ask, error, message) -> None:
    with pytest.raises(error, match=message):
        ask()


def test_rows_that_are_no_distributions_are_refused() -> None:
    matrix = Linear(eps=0.5)(X + 1, X + 1)
    with pytest.raises(sc.UnsupportedError, match="do not sum to 1"):
        head_distances(matrix)
    with pytest.raises(sc.UnsupportedError, match="layer 0 do not sum to 1"):
        rollout([matrix], [0])
    assert head_distances(matrix, "frobenius").tolist() == [[[0.0]]]


@pytest.mark.parametrize("between", ["jensen_shannon", "total_variation"])
def test_a_head_that_sees_nothing_is_far_from_one_that_does(between) -> None:
    x = torch.randn(1, 2, 5, 4, dtype=torch.float64)
    mask = torch.ones(1, 2, 5, 5, dtype=torch.bool)
    mask[:, 1, :3] = False
    mask[:, :, 0] = False
    matrix = sc.AttentionMatrix(x, x, mask)
    torch.testing.assert_close(head_distances(matrix, between), definition(matrix.to_dense(), between))
