"""Tests of the fused kernel alone: pitfalls of torch's private operation, and behaviour without it."""

import math

import pytest
import torch
from tests.engine.kernels.native_levels import NATIVE
from torch.utils._python_dispatch import TorchDispatchMode

import saccade as sc
from saccade import masks
from saccade.engine.kernels import aten_flash
from saccade.engine.kernels.fused import Fused
from saccade.engine.kernels.kernel import Request
from saccade.testing import oracle as definition

MASKS = [
    masks.Full(),
    masks.Causal(),
    masks.Window(5, 2),
    masks.Causal() & (masks.Window(3, 0) | masks.Global([0])),
    masks.Documents([7, 3, 11], rule=masks.Causal()),
    masks.Padding([21, 4]),
    masks.Causal() & masks.Padding([5, 21], side="left", padded_len=21),
    ~masks.Causal(),
    ~masks.Full(),
]


def _inputs(*, heads: int = 4, kv_heads: int = 2, q_len: int = 21, kv_len: int = 21, dim: int = 8, dtype=torch.float64):
    q = torch.randn(2, heads, q_len, dim, dtype=dtype)
    k, v = torch.randn(2, 2, kv_heads, kv_len, dim, dtype=dtype)
    return [x.requires_grad_() for x in (q, k, v)]


def _dtype(impl: str) -> torch.dtype:
    return torch.float32 if impl == "native" else torch.float64


def _agrees(mask: masks.Mask, *, q_len: int = 21, impl: str = "fused") -> None:
    q, k, v = _inputs(q_len=q_len)
    allowed = mask.to_dense(q_len, 21, batch=2, heads=4)
    expected, lse = definition.attention(q, k, v, allowed)
    out, own_lse = sc.attention_with_lse(q, k, v, mask, impl=impl)
    torch.testing.assert_close(out, expected, rtol=1e-10, atol=1e-10)
    torch.testing.assert_close(own_lse, lse, rtol=1e-10, atol=1e-10)
    seen = lse > -math.inf
    weights = torch.randn_like(out)
    grads = [
        torch.autograd.grad((o * weights).sum() + s[seen].sum(), (q, k, v))
        for o, s in ((out, own_lse), (expected, lse))
    ]
    for own, other in zip(*grads, strict=True):
        torch.testing.assert_close(own, other, rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize("mask", MASKS, ids=str)
@pytest.mark.parametrize("q_len", [21, 6])
def test_groups_written_out_where_torch_cannot_read_them(
    mask: masks.Mask, q_len: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(aten_flash, "reads_groups", lambda: False)
    _agrees(mask, q_len=q_len)


@pytest.mark.parametrize("mask", MASKS, ids=str)
@pytest.mark.parametrize("wide", [1, 8])
def test_parts_of_a_tile_merge(mask: masks.Mask, wide: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("saccade.engine.kernels.fused_calls._WIDE", wide)
    monkeypatch.setattr("saccade.plan.row_groups._ROW_BLOCKS", (4, 1))
    monkeypatch.setattr("saccade.plan.layout.TILE_COST", 0)
    monkeypatch.setattr("saccade.masks.plan_cache._cached_plan", sc.masks.plan_cache._cached_plan.__wrapped__)
    _agrees(mask)


@pytest.mark.parametrize("mask", MASKS, ids=str)
def test_without_the_private_operation_another_kernel_runs(mask: masks.Mask, monkeypatch: pytest.MonkeyPatch) -> None:
    def removed(*args: object, **kwargs: object) -> None:
        pytest.fail("the private operation was called although it is not available")

    monkeypatch.setattr(aten_flash, "_forward", removed)
    monkeypatch.setattr(aten_flash, "_backward", removed)
    monkeypatch.setattr(aten_flash, "is_available", lambda: False)
    _agrees(mask, impl="auto")
    q, k, _ = _inputs()
    explanation = sc.AttentionMatrix(q, k, mask).explain()
    assert explanation.kernel == "tiled"
    assert "lacks the operation" in explanation.skipped["fused"][0]
    with pytest.raises(sc.UnsupportedError, match="lacks the operation"):
        sc.attention(q, k, k, mask, impl="fused")


@pytest.mark.parametrize("missing", ["_forward", "_backward"])
def test_the_probe_notices_a_missing_operation(missing: str, monkeypatch: pytest.MonkeyPatch) -> None:
    assert aten_flash.is_available()
    monkeypatch.setattr(aten_flash, missing, None)
    assert not aten_flash.is_available.__wrapped__()


def test_the_probe_notices_a_wrong_result(monkeypatch: pytest.MonkeyPatch) -> None:
    original = aten_flash._forward
    monkeypatch.setattr(
        aten_flash, "_forward", lambda *args, **kwargs: tuple(1.1 * x for x in original(*args, **kwargs))
    )
    assert not aten_flash.is_available.__wrapped__()


@pytest.mark.parametrize("dim", [1, 3, 8, 80, 256, 512])
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16, torch.float16], ids=str)
def test_head_dims_and_dtypes(dim: int, dtype: torch.dtype) -> None:
    q, k, v = _inputs(dim=dim, dtype=dtype)
    mask = masks.Causal() & masks.Window(6, 0)
    allowed = mask.to_dense(21)
    expected, lse = definition.attention(q, k, v, allowed)
    out, own_lse = sc.attention_with_lse(q, k, v, mask, impl="fused")
    assert out.dtype == dtype
    assert own_lse.dtype == (torch.float64 if dtype == torch.float64 else torch.float32)
    error = {torch.float64: 1e-12, torch.float32: 1e-5, torch.bfloat16: 2e-2, torch.float16: 2e-3}[dtype]
    torch.testing.assert_close(out.double(), expected, rtol=error, atol=error)
    torch.testing.assert_close(own_lse.double(), lse, rtol=error, atol=error)
    grads = [torch.autograd.grad(x.sum(), (q, k, v)) for x in (out.double(), expected)]
    for own, other in zip(*grads, strict=True):
        torch.testing.assert_close(own, other, rtol=5 * error, atol=5 * error)


@pytest.mark.parametrize("value_dim", [1, 5, 8, 20])
def test_value_dim_may_differ(value_dim: int) -> None:
    q, k, _ = _inputs()
    v = torch.randn(2, 2, 21, value_dim, dtype=torch.float64, requires_grad=True)
    mask = masks.Causal()
    expected, _ = definition.attention(q, k, v, mask.to_dense(21))
    out = sc.attention(q, k, v, mask, impl="fused")
    torch.testing.assert_close(out, expected, rtol=1e-10, atol=1e-10)
    for own, other in zip(*(torch.autograd.grad(x.sum(), (q, k, v)) for x in (out, expected)), strict=True):
        torch.testing.assert_close(own, other, rtol=1e-10, atol=1e-10)


def _transposed(x: torch.Tensor) -> torch.Tensor:
    return x.mT.contiguous().mT


def _every_other(x: torch.Tensor) -> torch.Tensor:
    return x.repeat_interleave(2, 2)[:, :, ::2]


def _shared_batch(x: torch.Tensor) -> torch.Tensor:
    return x[:1].expand_as(x)


@pytest.mark.parametrize("view", [_transposed, _every_other, _shared_batch])
@pytest.mark.parametrize("mask", [masks.Causal(), masks.Window(4, 4)], ids=str)
def test_odd_strides(view, mask: masks.Mask) -> None:
    views = [view(x.detach()).requires_grad_() for x in _inputs()]
    plain = [x.detach().clone(memory_format=torch.contiguous_format).requires_grad_() for x in views]
    out, expected = (sc.attention(*three, mask, impl="fused") for three in (views, plain))
    torch.testing.assert_close(out, expected, rtol=1e-12, atol=1e-12)
    weights = _transposed(torch.randn_like(out))
    for own, other in zip(
        torch.autograd.grad(out, views, weights), torch.autograd.grad(expected, plain, weights), strict=True
    ):
        torch.testing.assert_close(own, other, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("impl", ["fused", "matmul", "tiled", "reference", NATIVE])
@pytest.mark.parametrize("shape", [(0, 2, 3, 4), (2, 0, 3, 4), (2, 2, 0, 4), (2, 2, 3, 0), (2, 2, 3, 4)])
@pytest.mark.parametrize("kv_len", [0, 3])
@pytest.mark.parametrize("mask", [None, masks.Causal()], ids=str)
def test_zero_lengths(impl: str, shape: tuple[int, ...], kv_len: int, mask: masks.Mask | None) -> None:
    batch, heads, q_len, dim = shape
    q = torch.randn(shape, requires_grad=True)
    k = torch.randn(batch, heads, kv_len, dim, requires_grad=True)
    v = torch.randn(batch, heads, kv_len, 5, requires_grad=True)
    out, lse = sc.attention_with_lse(q, k, v, mask, impl=impl)
    assert out.shape == (batch, heads, q_len, 5)
    assert lse.shape == (batch, heads, q_len)
    if kv_len == 0:
        assert not out.any()
        assert (lse == -math.inf).all()
    for grad, x in zip(torch.autograd.grad(out.sum(), (q, k, v)), (q, k, v), strict=True):
        assert grad.shape == x.shape
        assert torch.isfinite(grad).all()


def test_rows_without_keys_take_no_gradient() -> None:
    q, k, v = _inputs()
    out, lse = sc.attention_with_lse(q, k, v, ~masks.Causal(), impl="fused")
    assert not out[:, :, -1].any()
    assert (lse[:, :, -1] == -math.inf).all()
    grads = torch.autograd.grad(out.sum() + lse[:, :, :-1].sum(), (q, k, v))
    assert all(torch.isfinite(grad).all() for grad in grads)
    assert not grads[0][:, :, -1].any()


@pytest.mark.parametrize("impl", ["fused", "matmul", "tiled", "reference", NATIVE])
@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("where", ["key", "value"])
def test_hidden_values_cannot_spread(impl: str, bad: float, where: str) -> None:
    mask = masks.Causal() & masks.Padding([18, 21])
    q, k, v = (x.detach() for x in _inputs(dtype=_dtype(impl)))
    clean = sc.attention(q, k, v, mask, impl=impl)
    broken = {"key": k, "value": v}[where].clone()
    broken[0, 0, 19] = bad  # padding: no one may attend
    broken[1, 0, 10, 3] = bad  # later queries of two heads may attend
    k, v = (broken, v) if where == "key" else (k, broken)
    q, k, v = (x.requires_grad_() for x in (q, k, v))
    out = sc.attention(q, k, v, mask, impl=impl)
    hit = torch.zeros(2, 4, 21, dtype=torch.bool)
    hit[1, :2, 10:] = True
    torch.testing.assert_close(out[~hit], clean[~hit])
    if math.isnan(bad) or where == "value":
        assert out[hit].isnan().all()
    else:  # a score of -inf is a weight of 0, whatever the key holds; a score of inf is NaN
        allowed = mask.to_dense(21, batch=2)
        allowed[1, :, :, 10] = False
        without, _ = definition.attention(q, k.detach().nan_to_num(0, 0, 0), v, allowed)
        weightless = (q[..., 3] * bad < 0) & hit
        assert weightless.any()
        torch.testing.assert_close(out[weightless], without[weightless].to(out.dtype))
        assert out[hit & ~weightless].isnan().all()
    grads = torch.autograd.grad(out[~hit].sum(), (q, k, v))
    assert all(torch.isfinite(grad).all() for grad in grads)


@pytest.mark.parametrize("impl", ["fused", "matmul", NATIVE])
@pytest.mark.parametrize("mask", [None, masks.Causal(), masks.Window(1, 1)], ids=str)
@pytest.mark.parametrize("kv_len", [1, 3, 7, 15, 16, 40])
def test_a_row_of_nothing_but_nan_stays_nan(mask: masks.Mask | None, kv_len: int, impl: str) -> None:
    q, k, v = (torch.randn(1, 2, kv_len, 8) for _ in range(3))
    q[0, 1, -1] = math.nan
    out, lse = sc.attention_with_lse(q, k, v, mask, impl=impl)
    assert out[0, 1, -1].isnan().all()
    assert lse[0, 1, -1].isnan()
    assert torch.isfinite(out[0, 0]).all()
    assert sc.attention(q[:, :1], k[:, :1] * math.nan, v[:, :1], mask, impl=impl).isnan().all()


@pytest.mark.parametrize("scale", [-0.7, 0.0])
@pytest.mark.parametrize("mask", MASKS, ids=str)
def test_scales_that_are_not_positive(scale: float, mask: masks.Mask) -> None:
    q, k, v = _inputs()
    expected, lse = definition.attention(q, k, v, mask.to_dense(21, batch=2, heads=4), scale=scale)
    out, own_lse = sc.attention_with_lse(q, k, v, mask, scale=scale, impl="fused")
    torch.testing.assert_close(out, expected, rtol=1e-10, atol=1e-10)
    torch.testing.assert_close(own_lse, lse, rtol=1e-10, atol=1e-10)
    for own, other in zip(*(torch.autograd.grad(x.sum(), (q, k, v)) for x in (out, expected)), strict=True):
        torch.testing.assert_close(own, other, rtol=1e-9, atol=1e-9)


def test_a_mask_changed_before_backward_is_noticed() -> None:
    q, k, v = _inputs()
    allowed = torch.ones(21, 21, dtype=torch.bool).tril()
    out = sc.attention(q, k, v, allowed, impl="fused")
    allowed.fill_(True)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        out.sum().backward()


class _Largest(TorchDispatchMode):
    """A mode that records the size of the largest tensor that any operation returns."""

    entries = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        results = func(*args, **(kwargs or {}))
        for x in results if isinstance(results, tuple | list) else (results,):
            if isinstance(x, torch.Tensor):
                self.entries = max(self.entries, x.untyped_storage().nbytes() // x.element_size())
        return results


@pytest.mark.parametrize(
    "mask", [masks.Window(16, 16), masks.Causal() & (masks.Window(32, 0) | masks.Global([0])), masks.Causal()], ids=str
)
def test_no_tensor_grows_faster_than_the_inputs(mask: masks.Mask) -> None:
    largest = []
    for n in (2048, 4096):
        q, k, v = (torch.randn(1, 2, n, 16, requires_grad=True) for _ in range(3))
        with _Largest() as mode:
            sc.attention(q, k, v, mask, impl="fused").sum().backward()
        largest.append(mode.entries)
    assert largest[1] <= 4096 * 2 * 16
    assert largest[1] <= 2 * largest[0]


def test_residual_masks_are_kept_with_the_plan_and_bounded() -> None:
    q, k, v = (torch.randn(1, 1, 600, 8) for _ in range(3))
    mask = masks.Window(33, 21)
    sc.attention(q, k, v, mask, impl="fused")
    plan = mask.plan(600)
    kept = [x for x in plan.memo.values() if hasattr(x, "terms")]
    assert kept
    before = dict(plan.memo)
    sc.attention(q, k, v, mask, impl="fused")
    assert plan.memo == before


LONG = [
    (1536, masks.Window(64, 64)),
    (1536, masks.Causal() & (masks.Window(100, 0) | masks.Global([0, 700, 701]))),
    (960, masks.Documents([1] * 180 + [100, 680]) & masks.Padding([280])),
    (1200, masks.Documents([250, 3, 400, 200, 347], rule=masks.Causal() & masks.Window(90, 0))),
    (1280, masks.bigbird(64, random_blocks=2)),
    (1300, masks.sparse_transformer(37)),
    (1000, masks.Causal() & masks.Padding([900], side="left", padded_len=1000)),
]


@pytest.mark.ci
@pytest.mark.parametrize("n, mask", LONG, ids=[f"{n}-{mask}" for n, mask in LONG])
def test_many_tiles(n: int, mask: masks.Mask) -> None:
    q, k, v = (torch.randn(1, 2, n, 8, dtype=torch.float64, requires_grad=True) for _ in range(3))
    expected, lse = definition.attention(q, k, v, mask.to_dense(n).expand(1, 2, n, n))
    out, own_lse = sc.attention_with_lse(q, k, v, mask, impl="fused")
    torch.testing.assert_close(out, expected, rtol=1e-9, atol=1e-9)
    torch.testing.assert_close(own_lse, lse, rtol=1e-9, atol=1e-9)
    weights, seen = torch.randn_like(out), lse > -math.inf
    sides = ((out, own_lse), (expected, lse))
    grads = [torch.autograd.grad((o * weights).sum() + s[seen].sum(), (q, k, v)) for o, s in sides]
    for own, other in zip(*grads, strict=True):
        torch.testing.assert_close(own, other, rtol=1e-8, atol=1e-8)


def test_gradients_of_a_sink_are_summed_in_float32() -> None:
    mask = masks.streaming(1, 32)
    q, k, v = (torch.randn(1, 1, 2048, 16).bfloat16().requires_grad_() for _ in range(3))
    expected, _ = definition.attention(q, k, v, mask.to_dense(2048))
    (reference,) = torch.autograd.grad(expected.sum(), v)
    (own,) = torch.autograd.grad(sc.attention(q, k, v, mask, impl="fused").float().sum(), v)
    assert ((own - reference)[0, 0, 0].float().norm() / reference[0, 0, 0].float().norm()) < 5e-3


def test_a_hidden_key_of_minus_infinity_spoils_no_gradient() -> None:
    q, k, v = (torch.rand(1, 1, 8, 4) for _ in range(3))
    k[0, 0, 7] = -math.inf
    q, k, v = (x.requires_grad_() for x in (q, k, v))
    out = sc.attention(q, k, v, masks.Window(2, 0), impl="fused")
    assert torch.isfinite(torch.autograd.grad(out[:, :, :7].sum(), q)[0]).all()


@pytest.mark.parametrize("impl", ["fused", "matmul", "tiled", "reference", NATIVE])
def test_rows_that_the_bias_empties_take_no_gradient(impl: str) -> None:
    q, k, v = _inputs(dtype=_dtype(impl))
    bias = torch.zeros(21, 21, dtype=q.dtype)
    bias[3] = -math.inf
    out, lse = sc.attention_with_lse(q, k, v, masks.Causal(), bias=bias, impl=impl)
    assert not out[:, :, 3].any()
    assert (lse[:, :, 3] == -math.inf).all()
    assert all(torch.isfinite(grad).all() for grad in torch.autograd.grad(out.sum(), (q, k, v)))


@pytest.mark.parametrize("impl", ["fused", "matmul", "tiled", "reference", NATIVE])
@pytest.mark.parametrize("bad", [math.nan, math.inf])
def test_a_hidden_bias_does_not_spread(impl: str, bad: float) -> None:
    q, k, v = _inputs(q_len=4, kv_len=4, dtype=_dtype(impl))
    bias = torch.zeros(4, 4, dtype=q.dtype)
    expected = sc.attention(q, k, v, masks.Causal(), bias=bias, impl=impl)
    bias[0, 3] = bad
    assert torch.equal(sc.attention(q, k, v, masks.Causal(), bias=bias, impl=impl), expected)


def test_gradients_of_the_lse_may_be_large_or_nan() -> None:
    q, k, v = ((0.01 * torch.randn(1, 1, 16, 8)).half().requires_grad_() for _ in range(3))
    grads = []
    for impl in ("fused", "matmul", "tiled", "reference"):
        _, lse = sc.attention_with_lse(q, k, v, masks.Causal(), impl=impl)
        grads.append(torch.autograd.grad(lse, q, torch.full_like(lse, 131072.0))[0])
    torch.testing.assert_close(grads[0], grads[1], rtol=2e-2, atol=2.0)
    _, lse = sc.attention_with_lse(q, k, v, impl="fused")
    assert torch.autograd.grad(lse, q, torch.full_like(lse, math.nan))[0].isnan().all()


def test_a_function_that_changes_its_mind_before_backward_is_noticed() -> None:
    q, k, v = _inputs()
    limit = [3]
    out = sc.attention(q, k, v, lambda b, h, q, kv: kv < limit[0], impl="fused")
    limit[0] = 6
    with pytest.raises(RuntimeError, match="mask must return the same result in the forward and backward pass"):
        out.sum().backward()
    sc.attention(q, k, v, lambda b, h, q, kv: kv < limit[0], impl="fused").sum().backward()


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32], ids=str)
@pytest.mark.parametrize("is_slow", [False, True])
def test_half_precision_gradients_run_elsewhere_where_torch_multiplies_slowly(
    dtype: torch.dtype, is_slow: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(aten_flash, "multiplies_slowly", lambda each: is_slow and each.itemsize == 2)
    x = torch.randn(1, 2, 256, 32, dtype=dtype)
    trained = x.clone().requires_grad_()
    verdicts = [
        Fused().verdict(sc.AttentionMatrix(*inputs, None).inputs, Request(impl=impl))
        for inputs in ((x, x), (trained, x), (x, trained))
        for impl in ("auto", "fused")
    ]
    left = [bool(verdict.should_skip) for verdict in verdicts]
    assert left == [False, False, *[is_slow and dtype.itemsize == 2, False] * 2]
    few = trained[:, :, :64]
    assert not Fused().verdict(sc.AttentionMatrix(few, few).inputs, Request()).should_skip
    with torch.no_grad():
        assert not Fused().verdict(sc.AttentionMatrix(trained, x).inputs, Request()).should_skip
