"""Products whose rows are taken in squares equal the definition, in every respect."""

import itertools
from collections.abc import Callable
from typing import Any

import pytest
import torch
from tests.engine.kernels.native_levels import NATIVE, needs_native
from torch import Tensor

import saccade as sc
from saccade import masks, positions, scores
from saccade.engine.positions import row_permutation

HEIGHT, WIDTH = 17, 19  # neither a square nor made of squares
N = HEIGHT * WIDTH
NEAR = masks.Neighborhood(HEIGHT, WIDTH, (2, 1))
MASKS = {
    "neighborhood": (NEAR, N),
    "class token": (NEAR.after(1) | masks.Global([0]), N + 1),
    "causal": (NEAR & masks.Causal(), N),
    "text before and after": (NEAR.after(3) | masks.Window(2, 1), N + 5),
    "padding": (NEAR & masks.Padding([N - 40, N]), N),
    "predicate": (NEAR & masks.Predicate(lambda b, h, q, kv: (q + kv + h + b) % 3 != 0), N),
    "windows": (masks.ShiftedWindows(HEIGHT, WIDTH, 5, 2), N),
    "cross": (masks.Axial(HEIGHT, WIDTH), N),
    "two grids": (NEAR | masks.Neighborhood(HEIGHT + 1, WIDTH - 2, 1), N),
}


@pytest.fixture(autouse=True)
def small_grids_pay(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(row_permutation, "_TILE", 0)


def _inputs(n: int, q_len: int | None = None, kv_heads: int = 2) -> list[Tensor]:
    torch.manual_seed(0)
    shapes = ((4, n if q_len is None else q_len), (kv_heads, n), (kv_heads, n))
    return [torch.randn(2, heads, length, 8, requires_grad=True) for heads, length in shapes]


def _defined(query: Tensor, key: Tensor, value: Tensor, allowed: Tensor, bias: Tensor | float = 0.0) -> Tensor:
    """Compute dense attention in float64."""
    q, k, v = query.double(), *(x.double().repeat_interleave(query.shape[1] // x.shape[1], 1) for x in (key, value))
    scores = (q @ k.mT / query.shape[3] ** 0.5 + bias).masked_fill(~allowed, -torch.inf)
    empty = ~allowed.any(-1, keepdim=True)
    return scores.masked_fill(empty, 0.0).softmax(-1).masked_fill(empty, 0.0) @ v


def _check(out: Tensor, expected: Tensor, inputs: list[Tensor]) -> None:
    torch.testing.assert_close(out.double(), expected, atol=1e-5, rtol=1e-5)
    grad = torch.randn_like(out)
    for own, other in zip(
        torch.autograd.grad(out, inputs, grad, retain_graph=True),
        torch.autograd.grad(expected, inputs, grad.double()),
        strict=True,
    ):
        torch.testing.assert_close(own, other.to(own.dtype), atol=2e-5, rtol=2e-5)


CALLS_NOTHING = [name for name in MASKS if name != "predicate"]


@pytest.mark.ci
@pytest.mark.parametrize(
    "impl, name",
    [
        *itertools.product(["fused", "tiled"], MASKS),
        *(pytest.param("native", name, marks=needs_native) for name in CALLS_NOTHING),
    ],
)
def test_outputs_and_gradients(name: str, impl: Any) -> None:
    mask, n = MASKS[name]
    inputs = _inputs(n)
    _check(sc.attention(*inputs, mask, impl=impl), _defined(*inputs, mask.to_dense(n, batch=2, heads=4)), inputs)


def _runs_in_squares(matrix: sc.AttentionMatrix, **options: Any) -> bool:
    return matrix.explain(**options).pairs < matrix.mask.plan(*matrix.shape[2:], batch=2, heads=4).pairs


@pytest.mark.usefixtures("without_native")
def test_squares_are_taken_where_they_pay() -> None:
    x = torch.randn(2, 4, 64 * 64, 8)
    near = masks.Neighborhood(64, 64, 3)
    assert sc.AttentionMatrix(x, x, near).explain().pairs < 2 * 4 * 4096 * 200
    assert _runs_in_squares(sc.AttentionMatrix(x, x, near & masks.Causal()))
    assert not _runs_in_squares(sc.AttentionMatrix(x, x, masks.Neighborhood(64, 64, 64)))
    assert not _runs_in_squares(sc.AttentionMatrix(x, x, masks.Axial(64, 64)))
    cross = sc.AttentionMatrix(x, x, masks.Axial(64, 64))
    assert cross.explain().pairs == 2 * 4 * 4096 * 2 * 64  # rows and columns apart, merged
    assert cross.explain(dropout_p=0.5).pairs <= 2 * 4 * 4096 * 16 * 64  # complete rows: crosses of squares
    anywhere = torch.arange(4096)
    placed = sc.AttentionMatrix(x, x, near, q_positions=anywhere, kv_positions=anywhere)
    torch.testing.assert_close((placed @ x)[:, :, ::97], sc.attention(x, x, x, near)[:, :, ::97])


@pytest.mark.parametrize("q_len", [N - 30, 200])
def test_fewer_queries_than_keys(q_len: int) -> None:
    inputs = _inputs(N, q_len)
    _check(sc.attention(*inputs, NEAR), _defined(*inputs, NEAR.to_dense(q_len, N)), inputs)
    ranges = (range(N - q_len, N), range(N))
    placed = sc.attention(*inputs, NEAR, q_positions=ranges[0], kv_positions=ranges[1])
    torch.testing.assert_close(placed, sc.attention(*inputs, NEAR))
    part = [inputs[0], inputs[1][:, :, 40:], inputs[2][:, :, 40:]]
    late = sc.attention(*part, NEAR, q_positions=ranges[0], kv_positions=range(40, N))
    torch.testing.assert_close(late.double(), _defined(*part, NEAR.to_dense(q_len, N)[..., 40:]), atol=1e-5, rtol=1e-5)


def test_functions_get_positions_of_permuted_rows(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(row_permutation, "_PAIR", 0)
    late, first = 200, 40
    inputs = _inputs(N, late)
    part = [inputs[0], inputs[1][:, :, first:], inputs[2][:, :, first:]]
    rows, columns = torch.arange(N - late, N)[:, None], torch.arange(first, N)
    score = scores.Modified(lambda s, b, h, q, kv: s + 0.01 * q * (kv % 3))
    out = sc.attention(*part, NEAR, score=score, q_positions=range(N - late, N), kv_positions=range(first, N))
    want = _defined(*part, NEAR.to_dense(late, N)[..., first:], 0.01 * rows * (columns % 3))
    torch.testing.assert_close(out.double(), want, atol=2e-5, rtol=1e-5)


@pytest.mark.parametrize("shape", [(0, 4, 4), (2, 0, 0)], ids=["no items", "no heads"])
def test_empty_inputs_in_squares(monkeypatch: pytest.MonkeyPatch, shape: tuple[int, int, int]) -> None:
    monkeypatch.setattr(row_permutation, "_PAIR", 0)
    batch, heads, kv_heads = shape
    query, key = torch.randn(batch, heads, N, 8), torch.randn(batch, kv_heads, N, 8)
    assert sc.attention(query, key, key, NEAR).shape == query.shape
    assert sc.AttentionMatrix(query, key, NEAR).explain().pairs == 0


def _alibi_like() -> positions.Bias:
    return positions.ALiBi(4)


def _table() -> positions.Bias:
    table = positions.GridTable(4, HEIGHT, WIDTH)
    torch.nn.init.normal_(table.weight, generator=torch.Generator().manual_seed(1))
    return table


@pytest.mark.parametrize("make", [_alibi_like, _table])
@pytest.mark.parametrize("impl", ["fused", "tiled"])
def test_biases_of_positions(make: Callable[[], positions.Bias], impl: Any) -> None:
    bias, inputs = make(), _inputs(N)
    trained = list(bias.parameters()) if impl == "tiled" else []
    address = bias.address(torch.arange(N))
    apart = address[:, None] - address
    dense = bias.table(torch.arange(-int(address.max()), int(address.max()) + 1))[:, apart + address.max()].double()
    with torch.set_grad_enabled(impl == "tiled"):
        out = sc.attention(*inputs, NEAR, bias=bias, impl=impl)
    expected = _defined(*inputs, NEAR.to_dense(N), dense)
    if impl == "tiled":
        _check(out, expected, [*inputs, *trained])
    else:
        torch.testing.assert_close(out.double(), expected, atol=1e-5, rtol=1e-5)


def test_a_trained_dense_bias() -> None:
    inputs = _inputs(N)
    bias = torch.randn(4, N, N, requires_grad=True)
    by_key = torch.randn(2, 1, 1, N, requires_grad=True)
    for own in (bias, by_key):
        out = sc.attention(*inputs, NEAR, bias=own)
        _check(out, _defined(*inputs, NEAR.to_dense(N), own.double()), [*inputs, own])


def test_dropout_and_lse_do_not_depend_on_the_order(monkeypatch: pytest.MonkeyPatch) -> None:
    inputs = _inputs(N)
    matrix = sc.AttentionMatrix(*inputs[:2], NEAR, sink_logit=torch.randn(4), impl="tiled")
    assert _runs_in_squares(matrix, dropout_p=0.3)

    def all_of_it() -> list[Tensor]:
        out = matrix.matmul(inputs[2], dropout_p=0.3, seed=5)
        lse = sc.attention_with_lse(*inputs, NEAR, impl="tiled")[1]
        return [out, lse, *torch.autograd.grad(out.square().sum() + lse.sum(), inputs)]

    squares = all_of_it()
    monkeypatch.setattr(row_permutation, "_PAIR", 1e9)
    assert not _runs_in_squares(sc.AttentionMatrix(*inputs[:2], masks.Neighborhood(HEIGHT, WIDTH, 2), impl="tiled"))
    natural = sc.AttentionMatrix(*inputs[:2], NEAR, sink_logit=matrix.inputs.sink_logit, impl="reference")
    expected = natural.matmul(inputs[2], dropout_p=0.3, seed=5)
    lse = sc.attention_with_lse(*inputs, NEAR, impl="reference")[1]
    others = [expected, lse, *torch.autograd.grad(expected.square().sum() + lse.sum(), inputs)]
    for own, other in zip(squares, others, strict=True):
        torch.testing.assert_close(own, other, atol=2e-5, rtol=2e-5)


@pytest.mark.parametrize("impl", ["fused", "tiled", NATIVE])
def test_a_nan_reaches_those_who_see_it(impl: Any) -> None:
    query, key, value = (x.detach() for x in _inputs(N))
    clean = sc.attention(query, key, value, NEAR, impl=impl)
    value[0, 1, 150, 2] = torch.nan
    out = sc.attention(query, key, value, NEAR, impl=impl)
    sees = NEAR.to_dense(N)[0, 0, :, 150]
    assert out[0, 2:, sees].isnan().all()
    assert torch.equal(out[0, :, ~sees], clean[0, :, ~sees])
    assert torch.equal(out[0, :2], clean[0, :2])
    assert torch.equal(out[1], clean[1])


@pytest.mark.parametrize("impl", ["fused", "tiled", NATIVE])
def test_heads_still_merge_without_a_copy(impl: Any) -> None:
    x = torch.randn(1, 4, N, 16)
    out = sc.attention(x, x, x, NEAR, impl=impl)
    assert out.transpose(1, 2).is_contiguous()


def test_questions_keep_the_natural_order() -> None:
    x = torch.randn(1, 4, N, 8)
    matrix = sc.AttentionMatrix(x, x, NEAR)
    rows = [row for block in matrix.blocks() if block.heads.start == 0 for row in block.rows]
    assert rows == sorted(rows)
    torch.testing.assert_close(matrix.to_dense() @ x, matrix @ x, atol=1e-5, rtol=1e-5)
