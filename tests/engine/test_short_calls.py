"""Plain calls of few tokens: they equal the path with all checks, and leave to it whatever needs them."""

import math

import pytest
import torch
from torch import Tensor
from torch.autograd import forward_ad

import saccade as sc
from saccade import masks
from saccade.engine import short_calls
from saccade.matrix import functions
from saccade.testing import oracle

CAUSAL = masks.Causal()
MASKS = pytest.mark.parametrize("mask", [None, CAUSAL], ids=["full", "causal"])


@pytest.fixture
def answers(monkeypatch: pytest.MonkeyPatch) -> list[bool]:
    """Record for each call of `attention` whether `short_attention` answered it."""
    found: list[bool] = []

    def watched(*arguments: object) -> Tensor | None:
        out = short_calls.short_attention(*arguments)
        found.append(out is not None)
        return out

    monkeypatch.setattr(functions, "short_attention", watched)
    return found


def tensors(q_len: int = 9, kv_len: int | None = None, heads: int = 2, dtype: torch.dtype = torch.float32, **more):
    shapes = [(2, heads, n, 8) for n in (q_len, kv_len or q_len, kv_len or q_len)]
    return [torch.randn(*shape, dtype=dtype, **more) for shape in shapes]


@MASKS
@pytest.mark.parametrize("is_transposed", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_output_is_the_definition(mask, is_transposed, dtype, answers):
    inputs = tensors(dtype=dtype)
    if is_transposed:
        inputs = [x.transpose(1, 2).contiguous().transpose(1, 2) for x in inputs]
    allowed = torch.ones(9, 9, dtype=torch.bool) if mask is None else torch.ones(9, 9, dtype=torch.bool).tril()
    wide = [x.double() for x in inputs]
    want = oracle.attention(*wide, allowed.expand(2, 2, 9, 9))[0]
    tolerance = 1e-5 if dtype == torch.float32 else 2e-2
    torch.testing.assert_close(sc.attention(*inputs, mask).double(), want, atol=tolerance, rtol=tolerance)
    assert answers == [True]


@MASKS
@pytest.mark.parametrize("wanted", [(0,), (1,), (2,), (0, 1, 2)])
def test_gradients_and_second_derivatives_equal_the_reference(mask, wanted, answers):
    inputs = tensors()
    for index in wanted:
        inputs[index].requires_grad_()
    leaves, grad_out = [inputs[index] for index in wanted], torch.randn(2, 2, 9, 8, requires_grad=True)
    found = []
    for impl in ("auto", "reference"):
        grads = torch.autograd.grad(sc.attention(*inputs, mask, impl=impl), leaves, grad_out, create_graph=True)
        plain = torch.autograd.grad(sc.attention(*inputs, mask, impl=impl), leaves, grad_out)
        second = torch.autograd.grad(sum(x.sin().sum() for x in grads), [*leaves, grad_out], allow_unused=True)
        second = [torch.zeros_like(of) if x is None else x for x, of in zip(second, [*leaves, grad_out], strict=True)]
        found.append([*grads, *plain, *second])
    for got, want in zip(*found, strict=True):
        torch.testing.assert_close(got, want, atol=2e-5, rtol=1e-4)
    assert answers == [True, True]


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf, 3e38, -3e38])
@pytest.mark.parametrize("which", range(3))
@MASKS
def test_non_finite_numbers_reach_what_they_reach_with_all_checks(mask, which, bad):
    inputs = tensors()
    inputs[which][0, 1, 4] = bad
    for x in inputs:
        x.requires_grad_()
    grad_out = torch.randn(2, 2, 9, 8)
    out, want = sc.attention(*inputs, mask), sc.attention(*inputs, mask, impl="fused")
    torch.testing.assert_close(out, want, equal_nan=True)
    # Gradients may be NaN in the same rows only; which finite numbers stand there depends on what overflows.
    for got, other in zip(*(torch.autograd.grad(x, inputs, grad_out) for x in (out, want)), strict=True):
        hidden = slice(0, 4) if mask is not None else slice(0, 0)
        torch.testing.assert_close(got[0, 1, hidden], other[0, 1, hidden], equal_nan=True)
        torch.testing.assert_close(got[:, 0], other[:, 0])


@pytest.mark.parametrize("bad", [math.nan, math.inf])
def test_a_bad_gradient_reaches_what_it_reaches_in_the_tiled_kernel(bad):
    inputs = [x.requires_grad_() for x in tensors()]
    grad_out = torch.randn(2, 2, 9, 8)
    grad_out[1, 0, 3] = bad
    got, want = (
        torch.autograd.grad(sc.attention(*inputs, CAUSAL, impl=impl), inputs, grad_out) for impl in ("auto", "tiled")
    )
    for own, other in zip(got, want, strict=True):
        torch.testing.assert_close(own, other, equal_nan=True)


def test_a_key_of_minus_infinity_stays_out_of_gradients_of_rows_that_it_is_masked_for():
    inputs = tensors()
    inputs[0][0, 1, :, 0] = 1.0
    inputs[1][0, 1, 4, 0] = -math.inf  # its score is -inf and its weight 0 in every row
    for x in inputs:
        x.requires_grad_()
    grad_out = torch.randn(2, 2, 9, 8)
    out, want = (sc.attention(*inputs, CAUSAL, impl=impl) for impl in ("auto", "tiled"))
    torch.testing.assert_close(out, want, equal_nan=True)
    for got, other in zip(*(torch.autograd.grad(x, inputs, grad_out) for x in (out, want)), strict=True):
        torch.testing.assert_close(got, other, equal_nan=True)
        assert got[0, 1, :4].isfinite().all()


LEFT_TO_THE_OTHER_PATH = {
    "a mask of another kind": lambda q, k, v: sc.attention(q, k, v, masks.Window(2, 0)),
    "a causal rectangle": lambda q, k, v: sc.attention(q[:, :, :4], k, v, CAUSAL),
    "grouped heads": lambda q, k, v: sc.attention(q, k[:, :1], v[:, :1]),
    "another width of values": lambda q, k, v: sc.attention(q, k, v[..., :4]),
    "columns apart": lambda q, k, v: sc.attention(*(x.mT.contiguous().mT for x in (q, k, v))),
    "no width": lambda q, k, v: sc.attention(q[..., :0], k[..., :0], v[..., :0]),
    "no keys": lambda q, k, v: sc.attention(q, k[:, :, :0], v[:, :, :0]),
    "float64": lambda q, k, v: sc.attention(q.double(), k.double(), v.double()),
    "bfloat16 with gradients": lambda q, k, v: sc.attention(*(x.bfloat16().requires_grad_() for x in (q, k, v))),
    "subclasses": lambda q, k, v: sc.attention(q.as_subclass(type("Sub", (Tensor,), {})), k, v),
    "too many pairs": lambda q, k, v: sc.attention(*(x.repeat(200, 1, 1, 1) for x in (q, k, v))),
    "vmap": lambda q, k, v: torch.vmap(sc.attention)(q[None], k[None], v[None])[0],
}
REFUSED = {"scale": 0.5, "softcap": 2.0, "bias": torch.zeros(9, 9), "dropout_p": 0.1, "impl": "tiled"}


@pytest.mark.parametrize("name", LEFT_TO_THE_OTHER_PATH)
def test_what_needs_other_checks_is_left_to_the_other_path(name, answers):
    LEFT_TO_THE_OTHER_PATH[name](*tensors())
    assert not any(answers)


@pytest.mark.filterwarnings("ignore:.torch.jit.script. is deprecated")  # torch's own, as it begins jvp
def test_forward_mode_derivatives_are_left_to_the_other_path(answers):
    query, key, value = tensors()
    with forward_ad.dual_level():
        sc.attention(forward_ad.make_dual(query, query), key, value)
    assert answers == [False]


@pytest.mark.parametrize("option", REFUSED)
def test_options_are_left_to_the_other_path(option, answers):
    sc.attention(*tensors(), **{option: REFUSED[option]})
    assert answers == []


def test_autocast_and_modes_are_left_to_the_other_path(answers):
    with torch.autocast("cpu"):
        assert sc.attention(*tensors()).dtype == torch.bfloat16
    with torch.utils.flop_counter.FlopCounterMode(display=False):
        sc.attention(*tensors())
    assert answers == [False, False]


def test_a_recording_hears_short_calls(answers):
    heard = []
    functions.OBSERVERS.append(lambda *call: heard.append(call))
    try:
        sc.attention(*tensors(), CAUSAL)
    finally:
        functions.OBSERVERS.pop()
    assert len(heard) == 1
    assert answers == []


def test_batched_gradients_are_refused():
    inputs = [x.requires_grad_() for x in tensors()]
    out = sc.attention(*inputs)
    with pytest.raises(sc.UnsupportedError, match="one gradient at a time"):
        torch.autograd.grad(out, inputs, torch.ones(3, *out.shape), is_grads_batched=True)
