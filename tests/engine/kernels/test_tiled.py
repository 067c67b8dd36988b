"""The tiled kernel: what the laws do not say of it."""

import pytest
import torch

import saccade as sc
from saccade import masks, positions, scores
from saccade.engine import dropout
from saccade.engine.bias.relative import DistanceTerm
from saccade.engine.kernels import tiled_cost as blocks

MASKS = [
    None,
    masks.Causal(),
    masks.Window(9, 2),
    masks.Causal() & (masks.Window(6, 0) | masks.Global((0,))),
    masks.Padding((30, 41)),
    masks.Strided(4) | masks.Window(3, 0),
]


@pytest.fixture
def small_blocks(monkeypatch):
    """Blocks of a few rows, one head at a time, so that small problems have many."""
    monkeypatch.setattr(blocks, "_ROWS", 5)
    monkeypatch.setattr(blocks, "_ENTRIES", 300)


def problem(heads=4, kv_heads=2, q_len=37, kv_len=41, requires_grad=True):
    torch.manual_seed(0)
    sizes = [(2, heads, q_len, 8), (2, kv_heads, kv_len, 8), (2, kv_heads, kv_len, 6), (2, heads, q_len, 6)]
    q, k, v, grad = (torch.randn(*size, dtype=torch.float64) for size in sizes)
    return [x.requires_grad_(requires_grad) for x in (q, k, v)], grad


def dropped_by_definition(q, k, v, mask, dropout_p, seed):
    """The weights of the definition, the kept ones scaled up, times the values: dense, by autograd."""
    repeats = q.shape[1] // k.shape[1]
    k, v = k.repeat_interleave(repeats, 1), v.repeat_interleave(repeats, 1)
    q_len, kv_len = q.shape[2], k.shape[2]
    allowed = (masks.Full() if mask is None else mask).to_dense(q_len, kv_len, batch=len(q), heads=q.shape[1])
    weights = (q @ k.mT * 8**-0.5).masked_fill(~allowed, -torch.inf).softmax(-1).nan_to_num(0.0)
    b, h, i, j = torch.meshgrid(*(torch.arange(size) for size in weights.shape), indexing="ij")
    kept = dropout.keep(seed, b, h, i + kv_len - q_len, j, dropout_p)
    return (weights * kept / (1 - dropout_p)) @ v


@pytest.mark.parametrize("mask", MASKS, ids=str)
@pytest.mark.usefixtures("small_blocks")
def test_dropout_forward_and_backward_equal_the_definition(mask):
    tensors, grad = problem()
    out = sc.AttentionMatrix(*tensors[:2], mask, impl="tiled").matmul(tensors[2], dropout_p=0.3, seed=11)
    want = dropped_by_definition(*tensors, mask, 0.3, 11)
    torch.testing.assert_close(out, want)
    for got, expected in zip(*(torch.autograd.grad(x, tensors, grad) for x in (out, want)), strict=True):
        torch.testing.assert_close(got, expected)


@pytest.mark.parametrize("heads", [(8, 2), (6, 2), (4, 1), (4, 4)])
@pytest.mark.parametrize("q_len", [1, 5])
@pytest.mark.parametrize("entries", [123, 300, 700, 1000])
def test_few_rows_of_many_keys_are_cut_between_groups(heads, q_len, entries, monkeypatch):
    (q, k, v), _ = problem(*heads, q_len=q_len, requires_grad=False)
    k[1, :, 3] = torch.nan  # so that queries that cannot see it are looked for, in pieces too
    want = sc.attention(q, k, v, masks.Causal() & masks.Window(30, 0), impl="reference")
    monkeypatch.setattr(blocks, "_ENTRIES", entries)
    monkeypatch.setattr("saccade.engine.nonfinite._PAIRS_AT_ONCE", entries)
    for impl in ("tiled", "fused"):
        got = sc.attention(q, k, v, masks.Causal() & masks.Window(30, 0), impl=impl)
        torch.testing.assert_close(got, want, equal_nan=True)


@pytest.mark.parametrize("rows", [1, 7, 64])
def test_dropout_does_not_depend_on_the_tiling(rows, monkeypatch):
    (q, k, v), _ = problem(requires_grad=False)
    matrix = sc.AttentionMatrix(q.float(), k.float(), masks.Causal(), impl="tiled")
    whole = matrix.matmul(v.float(), dropout_p=0.4, seed=3)
    monkeypatch.setattr(blocks, "_ROWS", rows)
    monkeypatch.setattr(blocks, "_ENTRIES", 200)
    torch.testing.assert_close(matrix.matmul(v.float(), dropout_p=0.4, seed=3), whole, atol=2e-6, rtol=2e-6)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_words_drop_what_keep_does_not_keep(dtype):
    b, h = torch.zeros(1, 1, 1, 1, dtype=torch.int64), torch.arange(2)[None, :, None, None]
    q, kv = torch.arange(9)[None, None, :, None], torch.arange(13)[None, None, None]
    for p in (0.0, 0.1, 0.7):
        weights = torch.rand(1, 2, 9, 13, dtype=dtype) + 0.5
        made = dropout.Words(5, b, h, q, kv, p)
        out = torch.empty(1, 2, 9, 13, dtype=torch.int32)
        words = made.block(slice(0, 1), slice(0, 2), range(9), (range(13),), out=out)
        want = torch.where(dropout.keep(5, b, h, q, kv, p), weights, 0.0)
        assert torch.equal(dropout.drop_(weights.clone(), words), want)


def test_all_64_bits_of_a_seed_count():
    b = h = torch.zeros(1, 1, 1, 1, dtype=torch.int64)
    at = torch.arange(64)
    low, high = (dropout.keep(s, b, h, at[:, None], at, 0.5) for s in (1, 1 + (1 << 40)))
    assert not torch.equal(low, high)


@pytest.mark.parametrize(
    "bias",
    [
        torch.randn(1, 4, 37, 41, dtype=torch.float64),
        torch.randn(2, 1, 37, 1, dtype=torch.float64),
        torch.randn(1, 1, 1, 41, dtype=torch.float64),
        torch.randn(41, dtype=torch.float64),
        torch.randn((), dtype=torch.float64),
    ],
    ids=lambda bias: str(list(bias.shape)),
)
@pytest.mark.parametrize("mask", MASKS[:4], ids=str)
@pytest.mark.usefixtures("small_blocks")
def test_the_gradient_of_a_bias_of_any_shape(bias, mask):
    tensors, grad = problem()
    bias = bias.clone().requires_grad_()
    grads = [
        torch.autograd.grad(sc.attention(*tensors, mask, bias=bias, impl=impl), [*tensors, bias], grad)
        for impl in ("tiled", "reference")
    ]
    for got, expected in zip(*grads, strict=True):
        torch.testing.assert_close(got, expected)


@pytest.mark.parametrize(
    "make", [lambda: positions.ALiBi(4), lambda: positions.Clipped(4, 6)], ids=["alibi", "clipped"]
)
@pytest.mark.parametrize("impl", ["fused", "tiled"])
@pytest.mark.usefixtures("small_blocks")
def test_a_bias_of_distances_is_never_written_out(make, impl, monkeypatch):
    (q, k, v), _ = problem(requires_grad=False)
    bias = make().requires_grad_(False)
    want = sc.attention(q, k, v, masks.Causal(), bias=bias, impl="reference")
    monkeypatch.setattr("saccade.engine.kernels.fused_calls._READ_ROWS", 8)
    monkeypatch.setattr("saccade.engine.kernels.fused_calls._READ_ENTRIES", 700)
    read, largest = DistanceTerm.read, []

    def watched(self, tile):
        part = read(self, tile)
        largest.append(part.numel())
        return part

    monkeypatch.setattr(DistanceTerm, "read", watched)
    torch.testing.assert_close(sc.attention(q, k, v, masks.Causal(), bias=bias, impl=impl), want)
    assert max(largest) <= 16 * 41  # 16 rows, one head


@pytest.mark.parametrize("score", [scores.Bilinear(8, 8), scores.Additive(8, 8, 16), scores.Cosine()], ids=repr)
def test_autocast_does_not_reach_the_scores(score):
    (q, k, v), _ = problem(requires_grad=False)
    half = [x.bfloat16() for x in (q, k, v)]
    want = sc.AttentionMatrix(*half[:2], score=score, bias=positions.ShawKeys(8, 3)).to_dense()
    with torch.autocast("cpu", dtype=torch.bfloat16):
        got = sc.AttentionMatrix(*half[:2], score=score, bias=positions.ShawKeys(8, 3)).to_dense()
    assert torch.equal(got, want)


def test_a_key_of_minus_infinity_is_never_chosen_and_spoils_no_gradient():
    tensors, grad = problem()
    with torch.no_grad():
        tensors[1][:, :, 40] = -torch.inf
        tensors[0].abs_()
    grads = [
        torch.autograd.grad(sc.attention(*tensors, masks.Causal(), impl=impl), tensors, grad)
        for impl in ("tiled", "fused")
    ]
    for got, expected in zip(*grads, strict=True):
        assert torch.isfinite(got).all()
        torch.testing.assert_close(got, expected)


def test_a_function_that_answers_otherwise_in_the_backward_pass_is_an_error():
    tensors, grad = problem()
    limit = [20]
    out = sc.attention(*tensors, lambda b, h, q, kv: kv < limit[0], softcap=5.0)
    limit[0] = 30
    with pytest.raises(RuntimeError, match="must return the same result"):
        torch.autograd.grad(out, tensors, grad)


@pytest.mark.parametrize("scale", [8.0, -8.0])
@pytest.mark.parametrize("kv_heads", [4, 2])
@pytest.mark.parametrize("largest", ["query", "key", "both"])
def test_scores_whose_exponentials_leave_float32(scale, kv_heads, largest):
    own, grad = problem(kv_heads=kv_heads, requires_grad=False)
    q, k, v = (x.float() for x in own)
    q[0, 1, 4] *= 1.0 if largest == "key" else 9.0
    k[1, 1, 7] *= 1.0 if largest == "query" else 9.0
    own = [x.requires_grad_() for x in (q, k, v)]
    wide = [x.detach().double().requires_grad_() for x in own]
    out, lse = sc.attention_with_lse(*own, masks.Causal(), scale=scale, impl="tiled")
    want, want_lse = sc.attention_with_lse(*wide, masks.Causal(), scale=scale, impl="reference")
    torch.testing.assert_close(out.double(), want, atol=1e-3, rtol=1e-3)
    torch.testing.assert_close(lse.double(), want_lse, atol=1e-3, rtol=1e-4)
    found = torch.autograd.grad((out * grad.float()).sum() + lse[lse.isfinite()].sum(), own)
    expected = torch.autograd.grad((want * grad).sum() + want_lse[want_lse.isfinite()].sum(), wide)
    for got, exact in zip(found, expected, strict=True):
        torch.testing.assert_close(got.double(), exact, atol=2e-2, rtol=2e-2)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("score", [scores.Cosine(), scores.Gaussian(2.0), scores.Bilinear(8, 8)], ids=repr)
def test_half_precision_inputs_are_compared_in_float32(dtype, score):
    (q, k, v), grad = problem(requires_grad=False)
    half = [x.to(dtype).requires_grad_() for x in (q, k, v)]
    wide = [x.detach().double().requires_grad_() for x in half]
    out, want = (sc.attention(*x, masks.Causal(), score=score) for x in (half, wide))
    assert out.dtype == dtype
    torch.testing.assert_close(out.double(), want, atol=1e-2, rtol=1e-2)
    for got, expected in zip(
        torch.autograd.grad(out, half, grad.to(dtype)), torch.autograd.grad(want, wide, grad), strict=True
    ):
        torch.testing.assert_close(got.double(), expected, atol=3e-2, rtol=3e-2)
