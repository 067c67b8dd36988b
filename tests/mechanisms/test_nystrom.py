"""Nystrom: its definition, the limits in which it is exact, and padding that changes nothing."""

import itertools
import math

import pytest
import torch
from torch import Tensor

import saccade as sc
from saccade import masks
from saccade.masks import Causal, Dense, Mask, Padding
from saccade.mechanisms import Nystrom
from saccade.mechanisms.nystrom import pseudo_inverse, segment_means
from saccade.nn import MultiHeadAttention

F64 = torch.float64


def _inputs(q_len: int = 12, kv_len: int = 12, groups: int = 2) -> tuple[Tensor, Tensor, Tensor]:
    shapes = ((2, 4, q_len, 4), (2, groups, kv_len, 4), (2, groups, kv_len, 3))
    q, k, v = (torch.randn(shape, dtype=F64, requires_grad=True) for shape in shapes)
    return q, k, v


def _definition(q: Tensor, k: Tensor, m: int, inverse) -> Tensor:
    """Without padding, for lengths that m divides."""
    k = k.repeat_interleave(q.shape[1] // k.shape[1], 1)
    q_means, k_means = (x.unflatten(2, (m, -1)).mean(3) for x in (q, k))
    left, middle, right = (
        (a @ b.mT * q.shape[3] ** -0.5).softmax(-1) for a, b in ((q, k_means), (q_means, k_means), (q_means, k))
    )
    return left @ inverse(middle) @ right


@pytest.mark.parametrize("groups", [1, 2, 4])
@pytest.mark.parametrize("lengths", [(12, 12), (6, 12), (12, 3)], ids=str)
def test_products_and_gradients_are_those_of_the_definition(lengths: tuple[int, int], groups: int) -> None:
    q, k, v = _inputs(*lengths, groups)
    matrix = Nystrom(3, iterations=None)(q, k)
    weights = _definition(q, k, 3, torch.linalg.pinv)
    torch.testing.assert_close(matrix.to_dense(), weights)
    out, expected = matrix @ v, weights @ v.repeat_interleave(4 // groups, 1)
    torch.testing.assert_close(out, expected)
    torch.testing.assert_close(sc.Matrix.matmul(matrix, v), expected)
    x = torch.randn(2, 4, lengths[0], 2, dtype=F64)
    torch.testing.assert_close(matrix.mT @ x, weights.mT @ x)
    grad = torch.randn_like(out)
    own, true = (torch.autograd.grad(y, (q, k, v), grad) for y in (out, expected))
    torch.testing.assert_close(own, true)


@pytest.mark.parametrize("landmarks", [11, 12, 40])
@pytest.mark.parametrize("lengths", [(11, 11), (7, 11), (11, 7)], ids=str)
def test_exact_with_as_many_landmarks_as_tokens(lengths: tuple[int, int], landmarks: int) -> None:
    q, k, v = _inputs(*lengths)
    torch.testing.assert_close(Nystrom(landmarks, iterations=None)(q, k) @ v, sc.attention(q, k, v))


def test_exact_where_neighbours_are_alike() -> None:
    q, k, v = _inputs(6, 6)
    q, k, v = (x.repeat_interleave(4, 2) for x in (q, k, v))
    torch.testing.assert_close(Nystrom(6, iterations=None)(q, k) @ v, sc.attention(q, k, v))


def test_the_error_falls_with_the_square_of_the_segment() -> None:
    """Means of a smooth curve are off by the square of half a segment, and so is what follows from them."""
    at = torch.linspace(0, 1, 512, dtype=F64)
    q, k, v = (torch.stack([(at * a).sin(), (at * b).cos()], -1)[None, None] for a, b in ((3, 2), (2, 4), (5, 3)))
    exact = sc.attention(q, k, v)
    errors = [(Nystrom(m, iterations=None)(q, k) @ v - exact).norm().item() for m in (2, 4, 8)]
    assert errors[0] / errors[1] > 3
    assert errors[1] / errors[2] > 3


def test_each_step_cubes_the_distance_from_the_inverse() -> None:
    matrix = torch.eye(6, dtype=F64) + 0.05 * torch.randn(6, 6, dtype=F64)
    eye = torch.eye(6, dtype=F64)
    residual = [
        torch.linalg.matrix_norm(eye - matrix @ pseudo_inverse(matrix, steps), 2).item() for steps in range(1, 7)
    ]
    near = [(a, b) for a, b in itertools.pairwise(residual) if a < 0.3 and b > 1e-13]
    assert near
    assert all(after <= 2.0 * before**3 for before, after in near)
    torch.testing.assert_close(pseudo_inverse(matrix, 12), torch.linalg.inv(matrix))


def test_steps_converge_to_the_pseudo_inverse() -> None:
    left, right = (torch.linalg.qr(torch.randn(3, 5, 2, dtype=F64))[0] for _ in range(2))
    matrix = left @ torch.diag(torch.tensor([1.0, 0.7], dtype=F64)) @ right.mT  # of rank 2
    torch.testing.assert_close(pseudo_inverse(matrix, 12), torch.linalg.pinv(matrix), atol=1e-6, rtol=1e-6)
    torch.testing.assert_close(pseudo_inverse(torch.zeros(4, 4), 6), torch.zeros(4, 4))


def test_steps_are_taken_in_the_mechanism() -> None:
    q, k, v = _inputs()
    expected = _definition(q, k, 3, lambda middle: pseudo_inverse(middle, 6)) @ v.repeat_interleave(2, 1)
    torch.testing.assert_close(Nystrom(3)(q, k) @ v, expected)


def test_means_count_tokens_only() -> None:
    x = torch.arange(10.0).reshape(1, 1, 10, 1)
    none = torch.zeros(1, 10, dtype=torch.bool)
    means, empty = segment_means(x, none, 4)
    assert means.flatten().tolist() == [1.0, 3.5, 6.0, 8.5]  # of 3, 2, 3 and 2
    assert not empty.any()
    hidden = none.clone()
    hidden[0, [0, 4, 5, 9]] = True  # left: 1 2 3 6 7 8
    means, empty = segment_means(x, hidden, 4)
    assert means.flatten().tolist() == [1.5, 3.0, 6.5, 8.0]
    hidden[0, 3:] = True
    means, empty = segment_means(x, hidden, 4)
    assert means.flatten()[:2].tolist() == [1.0, 2.0]
    assert empty.tolist() == [[False, False, True, True]]


@pytest.mark.parametrize("iterations", [None, 6])
@pytest.mark.parametrize("side", ["left", "right"])
def test_padding_changes_nothing_whatever_it_holds(side: str, iterations: int | None) -> None:
    q, k, v = (x.detach() for x in _inputs())
    mask = Padding([12, 7], side=side, padded_len=12)
    own = slice(5, 12) if side == "left" else slice(0, 7)
    nystrom = Nystrom(3, iterations=iterations)
    alone = nystrom(q[1:, :, own], k[1:, :, own])
    expected = alone @ v[1:, :, own]
    hidden = torch.ones(12, dtype=torch.bool)
    hidden[own] = False
    k[1, :, hidden], v[1, :, hidden], q[1, :, hidden] = math.nan, math.inf, 1e3
    matrix = nystrom(q, k, mask=mask)
    torch.testing.assert_close((matrix @ v)[1:, :, own], expected)
    torch.testing.assert_close(matrix.to_dense()[1:, :, own, own], alone.to_dense())
    assert not matrix.to_dense()[1, :, :, hidden].any()
    positions = torch.where(hidden, -1, torch.arange(12)).expand(2, -1).clone()
    positions[0] = torch.arange(12)
    placed = nystrom(q, k, q_positions=positions, kv_positions=positions)
    torch.testing.assert_close((placed @ v)[1:, :, own], expected)
    assert not (placed @ v)[1, :, hidden].any()
    x = torch.randn(2, 4, 12, 2, dtype=F64)
    torch.testing.assert_close((placed.mT @ x)[1:, :, own], alone.mT @ x[1:, :, own])
    torch.testing.assert_close(placed.to_dense()[1:, :, own, own], alone.to_dense())


def test_an_item_without_keys_is_zero() -> None:
    q, k, v = _inputs()
    out = Nystrom(3, iterations=None)(q, k, mask=Padding([12, 0])) @ v
    assert not out[1].any()
    assert out[0].any()


def test_a_key_that_all_see_reaches_all() -> None:
    q, k, v = (x.detach() for x in _inputs())
    k[0, 0, 3, 1] = math.nan
    out = Nystrom(3, iterations=None)(q, k) @ v
    assert out[0, :2].isnan().all()
    assert out[1].isfinite().all()


@pytest.mark.parametrize("entries", [1, 40])
def test_blocks_of_any_size(entries: int, monkeypatch: pytest.MonkeyPatch) -> None:
    q, k, _ = _inputs()
    whole = Nystrom(3)(q, k, mask=Padding([12, 7])).to_dense()
    monkeypatch.setattr("saccade.mechanisms.linear_time._ENTRIES", entries)
    matrix = Nystrom(3)(q, k, mask=Padding([12, 7]))
    torch.testing.assert_close(matrix.to_dense(), whole)
    torch.testing.assert_close(matrix[1, 2, 5], whole[1, 2, 5])


def test_it_stands_in_a_layer_and_drops() -> None:
    layer = MultiHeadAttention(16, 4, mechanism=Nystrom(4), dropout_p=0.5)
    x = torch.randn(2, 12, 16)
    assert layer(x).isfinite().all()
    matrix = layer.matrix(x)
    value = torch.randn(2, 4, 12, 3)
    dropped = matrix.matmul(value, dropout_p=0.5, seed=1)
    torch.testing.assert_close(dropped, sc.Matrix.matmul(matrix, value, dropout_p=0.5, seed=1))
    assert not torch.allclose(dropped, matrix @ value)


@pytest.mark.parametrize(
    "mask", [Causal(), masks.Window(1, 1), masks.Documents([4]), Dense(torch.ones(4, 4, dtype=torch.bool))], ids=str
)
def test_masks_that_cannot_be_had(mask: Mask) -> None:
    x = torch.ones(1, 1, 4, 2)
    with pytest.raises(sc.UnsupportedError, match="lets queries see different keys: landmarks are means of tokens"):
        Nystrom(2)(x, x, mask=mask)
    with pytest.raises(sc.UnsupportedError, match=f"{type(mask).__name__} lets queries see different keys"):
        MultiHeadAttention(4, 2, mechanism=Nystrom(2))(torch.ones(1, 4, 4), mask=Padding([3]) & mask)


def test_wrong_arguments_are_refused() -> None:
    x = torch.ones(1, 1, 4, 2)
    with pytest.raises(ValueError, match="Nystrom: num_landmarks must be an int of at least 1; got 0"):
        Nystrom(0)
    with pytest.raises(ValueError, match="Nystrom: iterations must be an int of at least 1; got 0"):
        Nystrom(4, iterations=0)
    with pytest.raises(TypeError, match="Nystrom: scale must be a finite number; got True"):
        Nystrom(4, scale=True)
    assert not Nystrom(4)(x, x).is_stochastic
    with pytest.raises(sc.UnsupportedError, match="is_stochastic is False"):
        Nystrom(4)(x, x).entropy()
    torch.testing.assert_close(Nystrom(4, scale=0.0)(x, x).to_dense(), torch.full((1, 1, 4, 4), 0.25))
