"""Whatever a model does with its scores and weights, it gets what it would have got."""

import copy
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


USES = {
    "printed": lambda s, v: (str(s), s.softmax(-1) @ v)[1],
    "maximum first": lambda s, v: (s - s.max(-1, keepdim=True).values).softmax(-1) @ v,
    "exponentials": lambda s, v: s.exp() / s.exp().sum(-1, keepdim=True) @ v,
    "clamped": lambda s, v: s.clamp(-1, 1).softmax(-1) @ v,
    "wrong axis": lambda s, v: s.softmax(1) @ v,
    "over rows": lambda s, v: s.softmax(-2) @ v,
    "over everything": lambda s, v: s.flatten(-2).softmax(-1).view(2, 3, N, N) @ v,
    "over heads and keys": lambda s, v: s.transpose(1, 2).flatten(2).softmax(-1).view(2, N, 3, N).transpose(1, 2) @ v,
    "not softened": lambda s, v: s @ v,
    "squared": lambda s, v: s.softmax(-1) @ (s.softmax(-1) @ v),
    "cubed": lambda s, v: s.softmax(-1) @ s.softmax(-1) @ v,
    "two softmaxes": lambda s, v: s.softmax(-1).softmax(-1) @ v,
    "renormalised": lambda s, v: F.normalize(s.softmax(-1).tril(), p=1, dim=-1) @ v,
    "scaled weights": lambda s, v: (s.softmax(-1) * 0.5) @ v,
    "filled weights": lambda s, v: s.softmax(-1).masked_fill(torch.eye(N, dtype=torch.bool), 0.0) @ v,
    "weights of the top": lambda s, v: torch.where(s >= s.topk(2).values[..., -1:], s, -math.inf).softmax(-1) @ v,
    "best in place": lambda s, v: s.softmax(-1).scatter(-1, torch.zeros(2, 3, N, 1, dtype=torch.int64), 0.5) @ v,
    "written rows": lambda s, v: _written(s, (..., 0, slice(None)), 1.0).softmax(-1) @ v,
    "written weights": lambda s, v: _written(s.softmax(-1).clone(), (..., 0), 0.0) @ v,
    "squares": lambda s, v: (s * s).softmax(-1) @ v,
    "sum of scores": lambda s, v: (s + s.mT).softmax(-1) @ v,
    "reversed sign": lambda s, v: (-s).softmax(-1) @ v,
    "from one": lambda s, v: (1 - s).softmax(-1) @ v,
    "times zero": lambda s, v: (s * 0).softmax(-1) @ v,
    "times minus one": lambda s, v: (s * -1).softmax(-1) @ v,
    "masked then negated": lambda s, v: (s.masked_fill(_causal(), -1e9) * -1).softmax(-1) @ v,
    "times a mask": lambda s, v: (s * _causal()).softmax(-1) @ v,
    "weak fill": lambda s, v: s.masked_fill(_causal(), -1.0).softmax(-1) @ v,
    "fill of -200": lambda s, v: (s * 100).masked_fill(_causal(), -200.0).softmax(-1) @ v,
    "positive fill": lambda s, v: s.masked_fill(_causal(), 5.0).softmax(-1) @ v,
    "bias that only seems to hide": lambda s, v: (s * 3000 + -1e4 * _causal()).softmax(-1) @ v,
    "empty rows": lambda s, v: s.masked_fill(torch.ones(N, N).tril(-1) == 0, -1e9).softmax(-1) @ v,
    "empty rows, added": lambda s, v: (s + (torch.ones(N, N).tril(-1) - 1) * 1e9).softmax(-1) @ v,
    "empty rows, -inf": lambda s, v: s.masked_fill(torch.ones(N, N).tril(-1) == 0, -math.inf).softmax(-1) @ v,
    "NaN bias": lambda s, v: (s + torch.full((N, N), math.nan)).softmax(-1) @ v,
    "cap after the mask": lambda s, v: (s.masked_fill(_causal(), -1e9) / 5).tanh().softmax(-1) @ v,
    "larger bias": lambda s, v: (s + torch.ones(4, 1, 1, 1, 1)).softmax(-1) @ v,
    "larger mask": lambda s, v: s.masked_fill(_causal().expand(4, 1, 1, N, N), -1e9).softmax(-1) @ v,
    "larger values": lambda s, v: s.softmax(-1) @ v.expand(5, 2, 3, N, D),
    "values of queries": lambda s, v: torch.einsum(
        "bhij,bhijd->bhid", s.softmax(-1), v[:, :, None].expand(2, 3, N, N, D)
    ),
    "vector of values": lambda s, v: s.softmax(-1) @ v[0, 0, :, 0],
    "matrix of values": lambda s, v: s.softmax(-1) @ v[0, 0],
    "summed weights": lambda s, v: torch.einsum("bhij,bhjd->bhd", s.softmax(-1), v),
    "diagonal": lambda s, v: torch.einsum("bhii,bhid->bhid", s.softmax(-1), v),
    "into a buffer": lambda s, v: torch.matmul(s.softmax(-1).detach(), v.detach(), out=torch.empty(2, 3, N, D)),
    "dropped scores": lambda s, v: F.dropout(s, 0.0).softmax(-1) @ v,
    "chunks of heads": lambda s, v: torch.cat([x.softmax(-1) @ y for x, y in zip(s.chunk(3, 1), v.chunk(3, 1))], 1),
    "split view": lambda s, v: s.view(2, 3, N, 2, N // 2).softmax(-1).view(2, 3, N, N) @ v,
    "mixed view": lambda s, v: s.reshape(2, N, 3, N).softmax(-1).reshape(2, 3, N, N) @ v,
    "one head more": lambda s, v: torch.cat([s, s[:, :1]], 1)[:, 1:].softmax(-1) @ v,
    "sink": lambda s, v: torch.cat([s, torch.zeros(2, 3, N, 1)], -1).softmax(-1)[..., :-1] @ v,
    "integer weights": lambda s, v: s.softmax(-1).round().int().float() @ v,
    "complex": lambda s, v: (s.to(torch.complex64) @ v.to(torch.complex64)).real,
    "wide": lambda s, v: s.double().softmax(-1) @ v.double(),
    "copied": lambda s, v: copy.copy(s).softmax(-1) @ v,
    "numpy": lambda s, v: torch.from_numpy(s.detach().numpy()).softmax(-1) @ v,
    "list": lambda s, v: torch.tensor(s.tolist()).softmax(-1) @ v,
    "log": lambda s, v: s.log_softmax(-1).exp() @ v,
    "checked": lambda s, v: s.softmax(-1) @ v if s.isfinite().all() else v,
    "hooked": lambda s, v: (s.register_hook(lambda grad: 2 * grad), s.softmax(-1) @ v)[1],
}


def _causal():
    return torch.ones(N, N).triu(1) > 0


def _written(x, index, value):
    x[index] = value
    return x


@pytest.mark.filterwarnings("ignore:An output with one or more elements was resized")
@pytest.mark.parametrize("use", USES.values(), ids=USES)
def test_any_use(qkv, use):
    assert_agrees(lambda: use(scores(qkv), qkv[2]), qkv)


@pytest.mark.parametrize(
    "use", ["over rows", "weak fill", "empty rows", "empty rows, added", "clamped", "fill of -200", "renormalised"]
)
def test_not_attention(qkv, use):
    assert_agrees(lambda: USES[use](scores(qkv), qkv[2]), qkv, calls=0)


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


WRITES = {
    "query": lambda q, k, m, b: q.mul_(2.0),
    "key by index": lambda q, k, m, b: k.__setitem__((..., 0), 1.0),
    "key through a view": lambda q, k, m, b: k.mT.zero_(),
    "key through data": lambda q, k, m, b: k.data.add_(1.0),
    "mask": lambda q, k, m, b: m.fill_(True),
    "bias": lambda q, k, m, b: b.add_(torch.randn(N, N)),
    "bias, by out=": lambda q, k, m, b: torch.mul(b, 3.0, out=b),
    "bias, by relu": lambda q, k, m, b: F.relu(b, inplace=True),
    "bias, foreach": lambda q, k, m, b: torch._foreach_add_([b], 1.0),
    "bias, by NumPy": lambda q, k, m, b: b.numpy().fill(7.0),
    "bias, by copy": lambda q, k, m, b: b.copy_(torch.zeros(N, N)),
    "bias, by aten": lambda q, k, m, b: torch.ops.aten.add_(b, 1.0),
    "bias, replaced": lambda q, k, m, b: setattr(b, "data", torch.zeros(N, N)),
}


@pytest.mark.parametrize("write", WRITES.values(), ids=WRITES)
@pytest.mark.parametrize("when", ["product", "softmax"])
def test_operands_that_are_written_to(write, when):
    def attend():
        torch.manual_seed(0)
        q, k, v = (torch.randn(2, 3, N, D) for _ in range(3))
        mask, bias = _causal(), torch.randn(N, N)
        s = (q @ k.mT + bias).masked_fill(mask, -math.inf)
        if when == "product":
            write(q, k, mask, bias)
        weights = s.softmax(-1)
        if when == "softmax":
            write(q, k, mask, bias)
        return weights @ v

    assert_agrees(attend, calls=0)


def test_a_write_to_something_else(qkv):
    def attend():
        s, other = scores(qkv), torch.zeros(3)
        other += 1
        other[0] = 2
        return s.softmax(-1) @ qkv[2]

    assert_agrees(attend, qkv, calls=1)


ALIASES = {
    "view": lambda s: s.view(6, N, N),
    "transposed": lambda s: s.mT,
    "more axes": lambda s: s[:, None],
    "itself": lambda s: s.contiguous(),
    "copy": lambda s: s.clone(),
    "scaled": lambda s: s * 2,
    "cast": lambda s: s.to(torch.float32),
}


@pytest.mark.parametrize("alias", ALIASES.values(), ids=ALIASES)
def test_scores_that_are_written_to_beside_a_view(qkv, alias):
    def attend():
        s = scores(qkv)
        other = alias(s)
        other.masked_fill_(_causal(), -1e9)
        s.mul_(1.5)
        return s.softmax(-1) @ qkv[2] + other.reshape(2, 3, N, N).softmax(-1) @ qkv[2]

    assert_agrees(attend, qkv)


def test_in_place_without_gradient(qkv):
    def attend():
        s = scores(qkv)
        with torch.no_grad():
            s.masked_fill_(_causal(), -1e9)
        return s.softmax(-1) @ qkv[2]

    assert_agrees(attend, qkv, calls=0)


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


OTHERS = {
    "linear algebra": lambda x: torch.linalg.inv(x @ x.mT + torch.eye(N)) @ x,
    "matrix power": lambda x: (x @ x.mT).matrix_power(3),
    "logits": lambda x: ((x @ torch.ones(D, 11)).softmax(-1) @ torch.ones(11, 2)).log(),
    "experts": lambda x: torch.einsum("bne,bnd->bed", (x @ torch.ones(D, 3)).softmax(-1), x),
    "projection, then attention": lambda x: (x @ torch.ones(D, D) @ x.mT).softmax(-1) @ x,
    "integers": lambda x: (x.long() @ x.long().mT).float() @ x,
    "vectors": lambda x: x @ torch.ones(D),
    "by a column": lambda x: (x @ torch.ones(D, 1)).softmax(1).mT @ x,
    "nothing": lambda x: (x[:, :0] @ x.mT).softmax(-1) @ x,
    "no width": lambda x: (x[..., :0] @ x[..., :0].mT).softmax(-1) @ x,
    "no keys": lambda x: (x @ x[:, :0].mT).softmax(-1) @ x[:, :0],
    "one key": lambda x: (x @ x[:, :1].mT).softmax(-1) @ x[:, :1],
    "complex": lambda x: ((x + 0j) @ x.mH.conj().to(torch.complex64)).abs().softmax(-1) @ x,
    "three operands": lambda x: torch.einsum("bid,bjd,bjk->bik", x, x, x.softmax(-1)),
    "sparse": lambda x: torch.sparse.mm(torch.eye(N).to_sparse(), x[0]).softmax(-1) @ x[0].mT,
    "meta": lambda x: torch.zeros_like((x.to("meta") @ x.mT.to("meta")).softmax(-1) @ x.to("meta"), device="cpu"),
    "random numbers after dropout": lambda x: _random_after_dropout(x),
    "vmap": lambda x: torch.vmap(lambda y: (y @ y.mT).softmax(-1) @ y)(x),
    "jacobian": lambda x: torch.func.jacrev(lambda y: (y @ y.mT).softmax(-1) @ y)(x[0].detach()),
    "forward derivatives": lambda x: torch.func.jvp(lambda y: (y @ y.mT).softmax(-1) @ y, (x[0],), (x[0],))[1],
    "grad": lambda x: torch.autograd.grad(((x @ x.mT).softmax(-1) @ x).sum(), x, create_graph=True)[0],
}


def _random_after_dropout(x):
    weights = F.dropout((x @ x.mT).softmax(-1), 0.5)
    noise = torch.rand(3)
    return weights.relu() @ x + noise.sum()


@pytest.mark.filterwarnings("ignore:Sparse", "ignore:`torch.jit:DeprecationWarning")
@pytest.mark.parametrize("use", OTHERS.values(), ids=OTHERS)
def test_other_code(use):
    x = torch.randn(2, N, D, requires_grad=True)

    def seeded():
        torch.manual_seed(0)
        return use(x)

    assert_agrees(seeded, [x])


def test_nested_tensors():
    x = torch.nested.nested_tensor([torch.randn(3, D), torch.randn(5, D)], layout=torch.jagged)
    with FuseAttention():
        out = (x @ torch.eye(D)).values()
    assert torch.equal(out, x.values())


@pytest.mark.parametrize("mistake", ["shapes", "dtypes", "view", "axis", "fill"])
def test_mistakes_raise_what_torch_raises(mistake):
    q, k, v = (torch.randn(2, N, D) for _ in range(3))
    mistakes = {
        "shapes": lambda: q @ k[..., 1:].mT,
        "dtypes": lambda: (q @ k.mT).softmax(-1) @ v.double(),
        "view": lambda: (q @ k.mT).view(5, -1),
        "axis": lambda: (q @ k.mT).softmax(3),
        "fill": lambda: (q @ k.mT).masked_fill(torch.ones(N), -1e9),
    }
    with pytest.raises((RuntimeError, IndexError), match=".") as plain:
        mistakes[mistake]()
    with pytest.raises(type(plain.value), match=".") as fused, FuseAttention():
        mistakes[mistake]()
    assert str(fused.value) == str(plain.value)


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
