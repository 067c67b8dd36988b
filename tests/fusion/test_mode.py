"""A model gets the same results under fusion, whatever it does with its scores and weights."""

import math

import pytest
import torch
from tests.fusion.agreement import assert_agrees, run
from torch import nn
from torch.nn import functional as F

from saccade.fusion import FuseAttention

N, D = 6, 4


@pytest.fixture
def qkv():
    return [torch.randn(2, 3, N, D, requires_grad=True) for _ in range(3)]


def scores(qkv):
    return qkv[0] @ qkv[1].mT / math.sqrt(D)


def _causal():
    return torch.ones(N, N).triu(1) > 0


def test_scores_and_weights_are_not_built(qkv):
    q, k, v = qkv
    with FuseAttention():
        s = q @ k.mT
        weights = s.softmax(-1)
        out = weights @ v
        assert not s.pending.is_computed
        assert not weights.pending.is_computed
        assert type(out) is torch.Tensor
        del s, weights


def test_weights_that_are_returned(qkv):
    q, k, v = qkv

    def attend():
        weights = scores(qkv).masked_fill(_causal(), -math.inf).softmax(-1)
        return weights @ v, weights

    expected = attend()
    with FuseAttention() as _:
        out, weights = attend()
    torch.testing.assert_close(out, expected[0])
    assert torch.equal(weights, expected[1])
    assert weights.requires_grad
    grads = [torch.autograd.grad(x.square().sum(), (q, k)) for x in (weights, expected[1])]
    assert all(torch.equal(ours, theirs) for ours, theirs in zip(*grads, strict=True))


def test_in_place_without_gradient(qkv):
    def attend():
        s = scores(qkv)
        with torch.no_grad():
            s.masked_fill_(_causal(), -1e9)
        return s.softmax(-1) @ qkv[2]

    assert_agrees(attend, qkv, calls=0)


def test_a_view_is_changed_after_another_view_was_read(qkv):
    def attend():
        s = qkv[0] @ qkv[1].mT
        changed = s.view(2, 3, N, N)
        read = s.view(2, 3 * N, N) + 1  # before the change
        del s
        changed.masked_fill_(_causal(), -1e9)
        return changed.softmax(-1) @ qkv[2] + read.exp().view(2, 3, N, N) @ qkv[2]

    assert_agrees(attend, qkv)


@pytest.mark.parametrize("where", ["scores", "weights", "values"])
def test_a_part_without_gradient(qkv, where):
    def attend():
        with torch.set_grad_enabled(where != "scores"):
            s = scores(qkv)
        with torch.set_grad_enabled(where != "weights"):
            weights = s.softmax(-1)
        with torch.set_grad_enabled(where != "values"):
            return weights @ qkv[2]

    assert_agrees(attend, qkv)


def test_inference_mode(qkv):
    def attend():
        with torch.inference_mode():
            return scores(qkv).softmax(-1) @ qkv[2]

    assert_agrees(attend, calls=1)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_autocast(qkv, dtype):
    def attend():
        with torch.autocast("cpu", dtype=dtype):
            s = qkv[0] @ qkv[1].mT * 0.5
            return (s.float().softmax(-1) @ qkv[2]).float()

    plain, fused = run(attend, qkv, fused=False), run(attend, qkv, fused=True)
    assert len(fused.calls) == 1
    for ours, theirs in zip((fused.out, *fused.grads), (plain.out, *plain.grads), strict=True):
        torch.testing.assert_close(ours, theirs, atol=0.05, rtol=0.05)


def test_autocast_that_has_ended_when_scores_are_computed(qkv):
    def attend():
        with torch.autocast("cpu", dtype=torch.bfloat16):
            s = qkv[0] @ qkv[1].mT
        return s.abs().float() @ qkv[2]

    assert_agrees(attend, qkv, calls=0)


class _Softmax(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        weights = torch.softmax(x, -1)
        ctx.save_for_backward(weights)
        return weights

    @staticmethod
    def backward(ctx, grad):
        return torch._softmax_backward_data(grad, ctx.saved_tensors[0], -1, grad.dtype)


def test_functions_with_a_backward_of_their_own(qkv):
    def attend():
        s = scores(qkv)
        s += 1.0
        return _Softmax.apply(s.masked_fill(_causal(), -1e9)) @ qkv[2]

    assert_agrees(attend, qkv, calls=0)


def test_a_product_of_something_with_itself():
    x = torch.randn(2, N, D, requires_grad=True)
    assert_agrees(lambda: _Softmax.apply(x @ x.mT) @ x, [x], calls=0)
    assert_agrees(lambda: (x @ x.mT).softmax(-1) @ x, [x], calls=1)


@pytest.mark.parametrize("mistake", ["shapes", "dtypes", "view", "axis", "fill"])
def test_mistakes_raise_what_torch_raises(mistake):
    q, k, v = (torch.randn(2, N, D) for _ in range(3))
    mistakes = {
        "shapes": (lambda: q @ k[..., 1:].mT, "Expected size for first two dimensions"),
        "dtypes": (lambda: (q @ k.mT).softmax(-1) @ v.double(), "expected .* same dtype|expected scalar type"),
        "view": (lambda: (q @ k.mT).view(5, -1), "shape '.5, -1.' is invalid for input of size 72"),
        "axis": (lambda: (q @ k.mT).softmax(3), "Dimension out of range"),
        "fill": (lambda: (q @ k.mT).masked_fill(torch.ones(N), -1e9), "boolean masks"),
    }
    call, message = mistakes[mistake]
    with pytest.raises((RuntimeError, IndexError), match=message):
        call()
    with pytest.raises((RuntimeError, IndexError), match=message), FuseAttention():
        call()


def test_dropout_has_the_right_distribution():
    q, k, v = torch.randn(1, 2, 40, D), torch.randn(1, 2, 40, D), torch.ones(1, 2, 40, 1)
    with FuseAttention():
        kept = torch.stack([F.dropout((q @ k.mT).softmax(-1), 0.25) @ v for _ in range(200)])
    assert abs(float(kept.mean()) - 1.0) < 0.02
    weights = (q @ k.mT).softmax(-1)
    expected = (weights.square().sum(-1, keepdim=True) * 0.25 / 0.75).sqrt()
    torch.testing.assert_close(kept.std(0).mean(), expected.mean(), atol=0.0, rtol=0.05)


def test_training_with_dropout_gives_gradients(qkv):
    with FuseAttention():
        out = F.dropout(scores(qkv).softmax(-1), 0.5, training=True) @ qkv[2]
        out.sum().backward()
    assert all(x.grad is not None and bool(x.grad.isfinite().all()) for x in qkv)


def test_lazy_tensors_look_like_tensors(qkv):
    expected = scores(qkv)
    with FuseAttention():
        s = scores(qkv)
        for name in ("shape", "dtype", "device", "ndim", "requires_grad", "is_leaf", "layout"):
            assert getattr(s, name) == getattr(expected, name)
        assert (s.size(-1), len(s), s.numel(), s.dim()) == (N, 2, expected.numel(), 4)
        assert not s.pending.is_computed
        assert isinstance(s, torch.Tensor)
    assert s.pending.is_computed  # when the mode ends


def _causal_by_index(s):
    s[_causal().expand(s.shape)] = -1e9
    return s


MASKS = {
    "expand_as": lambda s: s.masked_fill(_causal().expand_as(s), -1e9),
    "type_as": lambda s: s + (_causal() * -1e9).type_as(s),
    "to": lambda s: s + (_causal() * -1e9).to(s),
    "to dtype": lambda s: s + (_causal() * -1e9).to(s.dtype),
    "new_full": lambda s: torch.where(_causal(), s.new_full((), -1e9), s),
    "full_like": lambda s: torch.where(_causal(), torch.full_like(s, -1e9), s),
    "zeros_like": lambda s: s + torch.zeros_like(s).masked_fill(_causal(), -math.inf),
    "by size": lambda s: s.masked_fill(torch.ones(s.size(-2), s.shape[-1]).triu(1) > 0, -1e9),
    "by index": _causal_by_index,
}


@pytest.mark.parametrize("mask", MASKS.values(), ids=MASKS)
def test_masks_that_are_made_after_scores(qkv, mask):
    assert_agrees(lambda: mask(scores(qkv)).softmax(-1) @ qkv[2], qkv, calls=1)


def test_hooks_for_saved_tensors(qkv):
    def attend(hooks):
        with hooks:
            return scores(qkv).softmax(-1) @ qkv[2]

    graph = torch.autograd.graph
    assert_agrees(lambda: attend(graph.save_on_cpu()), qkv, calls=1)
    assert_agrees(lambda: attend(graph.saved_tensors_hooks(lambda x: x, lambda x: x)), qkv, calls=0)  # may recompute


def test_a_write_that_no_function_reports(qkv):
    q, k, v = (x.detach() for x in qkv)
    message = "changed in place, outside of torch's functions"

    def written():
        s = q @ k.mT
        with torch._C.DisableTorchFunction():
            q.add_(1.0)
        return s

    with FuseAttention():
        s = written()
        with pytest.raises(RuntimeError, match=message):
            s.sin()
        s = written().softmax(-1)
        with pytest.raises(RuntimeError, match=message):
            s @ v  # and no error at the end of the mode, for a tensor that nothing reads


def test_nothing_lives_longer(qkv):
    with FuseAttention() as mode:
        out = F.dropout(scores(qkv).softmax(-1), 0.1) @ qkv[2]
        assert len(mode._families) == 0
        assert out.requires_grad


class _Backward(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        ctx.save_for_backward(x)
        return x.sum()

    @staticmethod
    def backward(ctx, grad):
        (x,) = ctx.saved_tensors
        product = x @ x.mT
        assert type(product) is torch.Tensor
        return grad * (product.softmax(-1) @ x)


def test_backward_passes_are_left_alone(qkv):
    calls = []
    with FuseAttention(on_attention=calls.append):
        _Backward.apply(qkv[0]).backward()
    assert calls == []
    torch.testing.assert_close(qkv[0].grad, (qkv[0] @ qkv[0].mT).softmax(-1) @ qkv[0])


def test_run(qkv):
    zero = torch.zeros(2, 3, N, D)
    with FuseAttention(lambda call: torch.zeros_like(call.query)):
        assert torch.equal(scores(qkv).softmax(-1) @ qkv[2], zero)
    with FuseAttention(lambda call: None):
        declined = scores(qkv).softmax(-1) @ qkv[2]
    assert torch.equal(declined, scores(qkv).softmax(-1) @ qkv[2])


def test_attention_call(qkv):
    q, k, v = qkv
    bias, calls = torch.randn(3, 1, 1), []
    with FuseAttention(on_attention=calls.append):
        F.dropout((scores(qkv) + bias).masked_fill(_causal(), -1e9).softmax(-1), 0.1) @ v
    (call,) = calls
    assert torch.equal(call.query, q)
    assert torch.equal(call.key, k)
    assert torch.equal(call.value, v)
    assert torch.equal(call.mask, ~_causal()[None, None])
    assert torch.equal(call.bias, bias[None])
    assert call.scale == pytest.approx(D**-0.5)
    assert (call.softcap, call.dropout_p) == (None, 0.1)
    expected = (scores(qkv) + bias).masked_fill(_causal(), -1e9).softmax(-1)
    torch.testing.assert_close(call.matrix().to_dense(), expected)


def test_torch_compile_runs(qkv):
    q, k, v = (x.detach() for x in qkv)
    attend = torch.compile(lambda q, k, v: (q @ k.mT).softmax(-1) @ v, backend="eager")
    with FuseAttention():
        out = attend(q, k, v)
    torch.testing.assert_close(out, (q @ k.mT).softmax(-1) @ v)


def test_a_lazy_argument_of_compiled_code(qkv):
    q, k, v = (x.detach() for x in qkv)
    attend = torch.compile(lambda s, v: s.softmax(-1) @ v, backend="eager")
    with FuseAttention():
        out = attend(q @ k.mT, v)
    torch.testing.assert_close(out, (q @ k.mT).softmax(-1) @ v)


@pytest.mark.filterwarnings("ignore:`torch.jit:DeprecationWarning")
def test_tracing(qkv):
    q, k, v = (x.detach() for x in qkv)
    with FuseAttention():
        traced = torch.jit.trace(lambda q, k, v: (q @ k.mT).softmax(-1) @ v, (q, k, v))
    torch.testing.assert_close(traced(q, k, 2 * v), (q @ k.mT).softmax(-1) @ v * 2)


@pytest.mark.filterwarnings("ignore:`torch.jit:DeprecationWarning")
def test_scripted_code_takes_lazy_tensors(qkv):
    softmax = torch.jit.script(_scripted)
    assert_agrees(lambda: softmax(scores(qkv)) @ qkv[2], qkv, calls=0)


def _scripted(x: torch.Tensor) -> torch.Tensor:
    return torch.softmax(x, -1)


def test_modules_of_torch(qkv):
    layer = nn.TransformerEncoderLayer(8, 2, 16, dropout=0.0, batch_first=True)
    x = torch.randn(2, N, 8)
    assert_agrees(lambda: layer(x), list(layer.parameters()), calls=0)
