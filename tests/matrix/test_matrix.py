"""The lazy matrix: products, rows, the dense form, and what it refuses."""

import math

import pytest
import torch

import saccade as sc
from saccade import masks
from saccade.testing import oracle as definition

MASK = masks.Causal() & (masks.Window(4, 0) | masks.Global([0])) & masks.Padding([17, 9])


def _matrix(**options: object) -> tuple[sc.AttentionMatrix, torch.Tensor, torch.Tensor]:
    q = torch.randn(2, 4, 13, 8, dtype=torch.float64)
    k = torch.randn(2, 2, 17, 8, dtype=torch.float64)
    eye = torch.eye(17, dtype=torch.float64).expand(2, 2, 17, 17)
    expected, lse = definition.attention(q, k, eye, MASK.to_dense(13, 17), **options)
    return sc.AttentionMatrix(q, k, MASK, **options), expected, lse


@pytest.mark.parametrize("entries", [1 << 18, 40])
@pytest.mark.parametrize(
    "options", [{}, {"scale": 0.3}, {"softcap": 2.0, "bias": torch.randn(4, 13, 17, dtype=torch.float64)}]
)
def test_every_question_agrees_with_the_definition(
    entries: int, options: dict[str, object], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("saccade.engine.tiles.tile_splitting._BLOCK_ENTRIES", entries)
    matrix, expected, lse = _matrix(**options)
    torch.testing.assert_close(matrix.to_dense(), expected)
    torch.testing.assert_close(matrix.mT.to_dense(), expected.mT)
    torch.testing.assert_close(matrix.lse, lse)
    x = torch.randn(2, 4, 13, 3, dtype=torch.float64)
    torch.testing.assert_close(matrix.mT @ x, expected.mT @ x)
    value = torch.randn(2, 2, 17, 3, dtype=torch.float64)
    product = expected @ value.repeat_interleave(2, 1)
    torch.testing.assert_close(matrix @ value, product)
    torch.testing.assert_close(sc.Matrix.matmul(matrix, value), product)
    for index in ((0, 0, 0), (1, 3, 12), (-1, -2, -3)):
        torch.testing.assert_close(matrix[index], expected[index])
    assert matrix.mT.mT is matrix
    assert matrix.mT.shape == (2, 4, 17, 13)


def test_products_and_lse_are_differentiable() -> None:
    q = torch.randn(1, 2, 5, 3, dtype=torch.float64, requires_grad=True)
    k = torch.randn(1, 1, 6, 3, dtype=torch.float64, requires_grad=True)
    x = torch.randn(1, 2, 5, 2, dtype=torch.float64, requires_grad=True)
    value = torch.randn(1, 1, 6, 2, dtype=torch.float64, requires_grad=True)
    mask = masks.Causal()
    assert torch.autograd.gradcheck(lambda q, k, x: sc.AttentionMatrix(q, k, mask).mT @ x, (q, k, x))
    assert torch.autograd.gradcheck(lambda q, k, v: sc.AttentionMatrix(q, k, mask) @ v, (q, k, value))
    assert torch.autograd.gradcheck(lambda q, k: sc.AttentionMatrix(q, k, mask).lse, (q, k))
    matrix = sc.AttentionMatrix(q, k, mask)
    for _ in range(2):  # the graph of one question must not be used up by another
        matrix.lse.sum().backward()


def test_lse_is_kept_after_a_product() -> None:
    matrix, _, lse = _matrix()
    value = torch.randn(2, 2, 17, 3, dtype=torch.float64)
    _ = matrix @ value
    assert matrix.lse is matrix.lse
    torch.testing.assert_close(matrix.lse, lse)


def test_nothing_dense_at_any_length() -> None:
    q = torch.randn(1, 1, 100_000, 4)
    matrix = sc.AttentionMatrix(q, q, masks.Causal(), impl="fused")
    with pytest.raises(
        ValueError, match=r"Matrix\.to_dense: size must be at most 67,108,864 weights; got 10,000,000,000"
    ):
        matrix.to_dense()
    row = matrix[0, 0, 99_999]
    torch.testing.assert_close(row, (q[0, 0, -1] @ q[0, 0].T / 2).softmax(-1))
    assert "tiles    1" in str(matrix.explain())


def test_to_dense_takes_another_limit() -> None:
    matrix, expected, _ = _matrix()
    torch.testing.assert_close(matrix.to_dense(limit=expected.numel()), expected)
    with pytest.raises(ValueError, match="at most 1,767 weights; got 1,768 weights"):
        matrix.to_dense(limit=expected.numel() - 1)


def test_a_non_finite_key_marks_the_rows_that_may_attend_to_it() -> None:
    q = torch.randn(1, 1, 4, 4)
    k = q.clone()
    k[0, 0, 2] = math.nan
    dense = sc.AttentionMatrix(q, k, masks.Causal()).to_dense()[0, 0]
    assert torch.isfinite(dense[:2]).all()
    assert dense[2:, :3].isnan().all()


def test_half_precision_weights_are_float32() -> None:
    q = torch.randn(1, 2, 6, 8, dtype=torch.bfloat16)
    matrix = sc.AttentionMatrix(q, q)
    assert matrix.to_dense().dtype == torch.float32
    assert matrix.lse.dtype == torch.float32
    assert (matrix @ q).dtype == torch.bfloat16
    assert (matrix.mT @ q).dtype == torch.bfloat16
    torch.testing.assert_close(matrix.to_dense().sum(-1), torch.ones(1, 2, 6))


@pytest.mark.usefixtures("without_native")
def test_explanation_counts_what_is_computed() -> None:
    q = torch.randn(2, 4, 64, 8)
    explanation = sc.AttentionMatrix(q, q, masks.Full()).explain()
    assert explanation.kernel == "fused"
    assert explanation.pairs == 2 * 4 * 64 * 64
    assert explanation.flops == 2 * explanation.pairs * 16
    assert explanation.skipped == {
        "native": explanation.skipped["native"],  # not installed, or switched off
        "matmul": ("with fewer than 131,072 pairs, other kernels start faster",),
        "sdpa": ("on CPUs the other kernels are faster",),
        "varlen": ("it runs on cuda, not on cpu",),
        "flex": ("it runs on cuda, not on cpu",),
        "tiled": ("it could run these inputs; fused is faster",),
        "reference": ("it could run these inputs; fused is faster",),
    }
    assert sc.AttentionMatrix(q, q, impl="tiled").explain().skipped == {}
    capped = sc.AttentionMatrix(q, q, softcap=3.0).explain()
    assert capped.kernel == "tiled"
    assert capped.skipped["fused"] == ("it has no softcap",)
    assert "not fused: it has no softcap" in str(capped)
    bias = torch.zeros(64, 64, requires_grad=True)
    assert sc.AttentionMatrix(q, q, bias=bias).explain().skipped["fused"] == ("it has no gradient for bias",)
    with torch.no_grad():
        assert sc.AttentionMatrix(q, q, bias=bias).explain().kernel == "fused"


@pytest.mark.usefixtures("without_native")
@pytest.mark.parametrize("n, head_dim, value_dim", [(64, 8, 8), (128, 8, 8), (64, 16, 8), (64, 8, 24)])
def test_explanation_tells_what_each_step_takes(n: int, head_dim: int, value_dim: int) -> None:
    q = torch.randn(1, 1, n, head_dim)
    explanation = sc.AttentionMatrix(q, q).explain(value_dim=value_dim)
    assert explanation.operations == {"QKᵀ": 2 * n**2 * head_dim, "softmax": n**2, "AV": 2 * n**2 * value_dim}
    told = f"steps    QKᵀ {2 * n**2 * head_dim / 1e9:.3g} GFLOP, softmax {n**2 / 1e9:.3g} G exponentials, AV "
    assert str(explanation).splitlines()[5].startswith(told)


def test_a_trainable_bias_gets_its_gradient() -> None:
    q, k, v = (torch.randn(2, 2, 5, 4, dtype=torch.float64) for _ in range(3))
    bias = torch.randn(1, 2, 5, 5, dtype=torch.float64, requires_grad=True)
    out = sc.attention(q, k, v, masks.Causal(), bias=bias)
    expected, _ = definition.attention(q, k, v, masks.Causal().to_dense(5), bias=bias)
    torch.testing.assert_close(out, expected)
    own, other = (torch.autograd.grad((x**2).sum(), bias)[0] for x in (out, expected))
    torch.testing.assert_close(own, other)


def test_packed_documents_equal_each_one_alone() -> None:
    lengths, rule = [5, 1, 8], masks.Causal() & (masks.Window(2, 0) | masks.Global([0]))
    q, k, v = (torch.randn(1, 2, 14, 4, dtype=torch.float64) for _ in range(3))
    packed = sc.attention(q, k, v, masks.Documents(lengths, rule=rule))
    alone = [sc.attention(*(x.split(lengths, 2)[i] for x in (q, k, v)), rule) for i in range(len(lengths))]
    torch.testing.assert_close(packed, torch.cat(alone, 2))


def test_positions_place_ragged_rows_evicted_keys_and_shards() -> None:
    mask = masks.Causal() & (masks.Window(3, 0) | masks.Global([0]))
    q, k, v = (torch.randn(1, 2, 12, 4, dtype=torch.float64) for _ in range(3))
    whole = sc.attention(q, k, v, mask)
    kept = torch.tensor([0, 7, 8, 9, 10, 11])  # what a sink and a window leave of the cache
    last = sc.attention(
        q[:, :, -1:], k[:, :, kept], v[:, :, kept], mask, q_positions=torch.tensor([11]), kv_positions=kept
    )
    torch.testing.assert_close(last, whole[:, :, -1:])
    padded = [torch.cat([torch.full_like(x[:, :, :2], math.nan), x], 2) for x in (q, k, v)]
    positions = torch.tensor([-1, -1, *range(12)])
    left = sc.attention(*padded, mask, q_positions=positions, kv_positions=positions)
    torch.testing.assert_close(left[:, :, 2:], whole)
    some = torch.tensor([9, 2, 5])
    torch.testing.assert_close(sc.attention(q[:, :, some], k, v, mask, q_positions=some), whole[:, :, some])
    torch.testing.assert_close(
        sc.attention(q[:, :, 4:7], k[:, :, :7], v[:, :, :7], mask, q_positions=range(4, 7), kv_positions=range(7)),
        whole[:, :, 4:7],
    )


@pytest.mark.parametrize(
    "part, error, sentence",
    [
        ({"batch": "a"}, TypeError, "batch must be an int or None; got 'a'"),
        ({"batch": True}, TypeError, "batch must be an int or None; got True"),
        ({"batch": 2}, ValueError, "batch must be at least 0 and below 2; got 2"),
        ({"head": 1.0}, TypeError, "head must be an int or None; got 1.0"),
        ({"head": -1}, ValueError, "head must be at least 0 and below 3; got -1"),
        ({"rows": "a"}, TypeError, "rows must be a range or None; got 'a'"),
        ({"rows": 3}, TypeError, "rows must be a range or None; got 3"),
        ({"rows": range(0, 4, 2)}, ValueError, r"rows must be a range with step 1; got range\(0, 4, 2\)"),
    ],
    ids=str,
)
def test_blocks_of_what_is_not_there_are_refused_at_once(
    part: dict[str, object], error: type[Exception], sentence: str
) -> None:
    x = torch.zeros(2, 3, 4, 8)
    with pytest.raises(error, match=rf"AttentionMatrix\.blocks: {sentence}"):
        sc.AttentionMatrix(x, x).blocks(**part)


@pytest.mark.parametrize("name", ["scale", "softcap"])
def test_a_number_that_no_float_holds_is_refused(name: str) -> None:
    x = torch.zeros(1, 1, 4, 8)
    with pytest.raises(ValueError, match=f"AttentionMatrix: {name} must be a finite number.*; got 1000"):
        sc.AttentionMatrix(x, x, **{name: 10**400})


@pytest.mark.parametrize(
    "mechanism", [sc.mechanisms.Linear(), sc.mechanisms.Linformer(4, 2), sc.mechanisms.Nystrom(2)], ids=str
)
@pytest.mark.parametrize("part", [{"batch": "a"}, {"head": 1.0}, {"rows": 3}], ids=str)
def test_blocks_of_approximations_are_refused_alike(
    mechanism: sc.mechanisms.Mechanism, part: dict[str, object]
) -> None:
    x = torch.zeros(2, 3, 4, 8)
    with pytest.raises(TypeError, match=rf"Matrix\.blocks: {next(iter(part))} must be an? (int|range) or None; got"):
        next(mechanism(x, x).blocks(**part))
