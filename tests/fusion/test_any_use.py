"""Scores and weights may be used in any way: the results are those without fusion."""

import copy
import math

import pytest
import torch
from tests.fusion.agreement import assert_agrees
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


def _written(x, index, value):
    x[index] = value
    return x


def _plus(x, s):
    x += s
    return x


def _chunks(s, v):
    return zip(s.chunk(3, 1), v.chunk(3, 1), strict=True)


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
    "empty rows after a bias": lambda s, v: (
        (s + torch.randn(3, 1, 1, generator=torch.Generator().manual_seed(1)))
        .masked_fill(torch.ones(N, N).tril(-1) == 0, -1e9)
        .softmax(-1)
        @ v
    ),
    "empty rows before a bias": lambda s, v: (
        (s.masked_fill(torch.ones(N, N).tril(-1) == 0, -1e9) + _causal() * 2.0).softmax(-1) @ v
    ),
    "rows of different numbers": lambda s, v: (
        torch.where(torch.ones(N, N).tril(-1) == 1, s, -1e9 * torch.linspace(1, 1.0001, N)).softmax(-1) @ v
    ),
    "rows with two numbers": lambda s, v: (
        s.masked_fill(torch.ones(N, N).tril(-1) == 0, -1e9)
        .masked_fill(torch.ones(N, N).triu(3) == 1, -1e10)
        .softmax(-1)
        @ v
    ),
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
    "chunks of heads": lambda s, v: torch.cat([x.softmax(-1) @ y for x, y in _chunks(s, v)], 1),
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
    "added to a buffer": lambda s, v: torch.zeros(2, 3, N, N).add_(s).softmax(-1) @ v,
    "buffer plus": lambda s, v: _plus(torch.ones(2, 3, N, N), s).softmax(-1) @ v,
    "copied to a buffer": lambda s, v: torch.zeros(2, 3, N, N).copy_(s).softmax(-1) @ v,
    "assigned to a buffer": lambda s, v: _written(torch.zeros(2, 3, N, N), (slice(None),), s).softmax(-1) @ v,
    "new tensor": lambda s, v: s.softmax(-1).new_tensor(s.tolist()) @ v,
    "log": lambda s, v: s.log_softmax(-1).exp() @ v,
    "checked": lambda s, v: s.softmax(-1) @ v if s.isfinite().all() else v,
    "hooked": lambda s, v: (s.register_hook(lambda grad: 2 * grad), s.softmax(-1) @ v)[1],
}


@pytest.mark.filterwarnings("ignore:An output with one or more elements was resized")
@pytest.mark.parametrize("use", USES.values(), ids=USES)
def test_any_use(qkv, use):
    assert_agrees(lambda: use(scores(qkv), qkv[2]), qkv)


@pytest.mark.parametrize(
    "use",
    [
        *("over rows", "weak fill", "empty rows, added", "empty rows, -inf", "empty rows before a bias"),
        *("rows with two numbers", "rows of different numbers", "clamped", "fill of -200", "renormalised"),
    ],
)
def test_not_attention(qkv, use):
    assert_agrees(lambda: USES[use](scores(qkv), qkv[2]), qkv, calls=0)


def _random_after_dropout(x):
    weights = F.dropout((x @ x.mT).softmax(-1), 0.5)
    noise = torch.rand(3)
    return weights.relu() @ x + noise.sum()


@pytest.mark.parametrize("use", ["empty rows", "empty rows after a bias"])
def test_rows_whose_keys_are_all_hidden_alike(qkv, use):
    assert_agrees(lambda: USES[use](scores(qkv), qkv[2]), qkv, calls=1)


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
    "random numbers after dropout": _random_after_dropout,
    "vmap": torch.vmap(lambda y: (y @ y.mT).softmax(-1) @ y),
    "jacobian": lambda x: torch.func.jacrev(lambda y: (y @ y.mT).softmax(-1) @ y)(x[0].detach()),
    "forward derivatives": lambda x: torch.func.jvp(lambda y: (y @ y.mT).softmax(-1) @ y, (x[0],), (x[0],))[1],
    "grad": lambda x: torch.autograd.grad(((x @ x.mT).softmax(-1) @ x).sum(), x, create_graph=True)[0],
}


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


def test_a_product_that_is_not_contiguous_can_be_made_so():
    x, y = torch.randn(3, 2, 4), torch.randn(2, 5, 4)

    def product():
        return torch.einsum("ijb,jcb->icb", x, y)

    assert not product().is_contiguous()
    with FuseAttention():
        out = product().contiguous().view(15, 4)
    assert torch.equal(out, product().contiguous().view(15, 4))


def _kept_before(s, v):
    kept = s * 2
    kept.add_(1.0)
    return kept.softmax(-1) @ v + s.sum() + kept.sum()


def _derived_before(s, v):
    kept = s * 2
    derived = kept + torch.eye(N)
    kept.add_(1.0)
    return derived.softmax(-1) @ v + kept.sum()


@pytest.mark.parametrize(("use", "calls"), [(_kept_before, 1), (_derived_before, 0)])
def test_in_place_beside_other_scores_in_use(qkv, use, calls):
    assert_agrees(lambda: use(scores(qkv), qkv[2]), qkv, calls=calls)


def test_a_mask_that_multiplies_needs_one_that_hides(qkv):
    visible = (~_causal()).float()
    assert_agrees(lambda: (scores(qkv) * visible).softmax(-1) @ qkv[2], qkv, calls=0)
    hidden = 1e9 * (1 - visible)
    assert_agrees(lambda: (scores(qkv) * visible - hidden).softmax(-1) @ qkv[2], qkv, calls=1)
    hidden[3, 5] = 0.0
    assert_agrees(lambda: (scores(qkv) * visible - hidden).softmax(-1) @ qkv[2], qkv, calls=0)
