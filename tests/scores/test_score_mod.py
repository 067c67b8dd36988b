"""Functions of scores: batch items and heads, what is captured, and what is refused. The laws say the rest."""

import re

import pytest
import torch
from torch import nn
from torch.nn.attention.flex_attention import flex_attention

import saccade as sc
from saccade import masks, mechanisms, scores
from saccade.engine.bias.score_mod import Modification
from saccade.support.errors import UnsupportedError

IMPLS = ["auto", "tiled", "reference"]


def inputs(heads=4, q_len=9, kv_len=9, width=8, batch=2, dtype=torch.float64):
    torch.manual_seed(0)
    sizes = [(batch, heads, q_len, width), (batch, heads, kv_len, width), (batch, heads, kv_len, 5)]
    return [torch.randn(*size, dtype=dtype).requires_grad_() for size in sizes]


def dense(function, query, key, value, mask):
    """Compute attention by definition, with an index for every pair."""
    batch, heads, q_len, width = query.shape
    kv_len = key.shape[2]
    b, h, q, kv = torch.meshgrid(*(torch.arange(n) for n in (batch, heads, q_len, kv_len)), indexing="ij")
    made = function(query @ key.mT * width**-0.5, b, h, q + kv_len - q_len, kv)
    return made.masked_fill(~mask.to_dense(q_len, kv_len), -torch.inf).softmax(-1) @ value


@pytest.mark.parametrize("impl", IMPLS)
@pytest.mark.parametrize("mask", [masks.Full(), masks.Causal(), masks.Window(2, 1)])
def test_captured_tensors_of_a_function_get_gradients(impl, mask):
    tensors = inputs(q_len=7)
    table, gates = torch.randn(4, 30, dtype=torch.float64), torch.randn(2, 4, dtype=torch.float64)
    root = table.requires_grad_()
    leaves, made = [*tensors, root, gates.requires_grad_()], root.exp()

    def function(score, b, h, q, kv):
        return score * gates[b, h].sigmoid() + made[h, q - kv + 15]

    grad = torch.randn(2, 4, 7, 5, dtype=torch.float64)
    out = sc.attention(*tensors, mask, score=function, impl=impl)
    expected = dense(function, *tensors, mask)
    torch.testing.assert_close(out, expected)
    got = torch.autograd.grad(out, leaves, grad, retain_graph=True)
    for own, their in zip(got, torch.autograd.grad(expected, leaves, grad), strict=True):
        torch.testing.assert_close(own, their)


@pytest.mark.filterwarnings("ignore")
def test_a_function_of_flex_attention_is_taken_as_it_is():
    query, key, value = (x.detach() for x in inputs(dtype=torch.float32))
    slopes = torch.tensor([0.5, 0.25, 0.1, 0.0])

    def score_mod(score, b, h, q_idx, kv_idx):
        return torch.where(q_idx >= kv_idx, score - slopes[h] * (q_idx - kv_idx) * (b + 1), -float("inf"))

    theirs = flex_attention(query, key, value, score_mod=score_mod)
    torch.testing.assert_close(sc.attention(query, key, value, score=score_mod), theirs)


def test_a_module_trains():
    class Learned(nn.Module):
        def __init__(self):
            super().__init__()
            self.slope = nn.Parameter(torch.zeros(4))

        def forward(self, score, b, h, q, kv):
            return score - self.slope[h] * (q - kv)

    mechanism = mechanisms.Softmax(score=Learned())
    assert [name for name, _ in mechanism.named_parameters()] == ["score.function.slope"]
    query, key, value = (x.detach().float() for x in inputs())
    before = mechanism(query, key, mask=masks.Causal()).matmul(value)
    before.square().sum().backward()
    slope = mechanism.score.function.slope
    assert slope.grad.abs().min() > 0
    with torch.no_grad():
        slope.sub_(1e-3 * slope.grad)
    after = mechanism(query, key, mask=masks.Causal()).matmul(value)
    assert after.square().sum() < before.square().sum()


@pytest.mark.parametrize("impl", IMPLS)
def test_a_function_without_scores_gives_them_no_gradient(impl):
    tensors = inputs()
    flat = scores.Modified(lambda score, b, h, q, kv: (q - kv).to(score.dtype))
    out = sc.attention(*tensors, score=flat, impl=impl)
    query, key, _ = torch.autograd.grad(out.sum(), tensors, allow_unused=True)
    assert all(x is None or not x.any() for x in (query, key))


def test_a_function_may_write_into_what_it_gets():
    tensors = inputs()
    written = sc.attention(*tensors, score=lambda score, b, h, q, kv: score.mul_(0.5).sub_((q - kv).abs()))
    other = sc.attention(*tensors, score=lambda score, b, h, q, kv: score * 0.5 - (q - kv).abs())
    grad = torch.randn_like(other)
    for own, their in zip(
        torch.autograd.grad(written, tensors, grad), torch.autograd.grad(other, tensors, grad), strict=True
    ):
        torch.testing.assert_close(own, their)


def test_positions_are_those_that_were_given():
    query, key, value = inputs(q_len=2, kv_len=4)
    seen = []

    def function(score, b, h, q, kv):
        seen.append((q.flatten().tolist(), kv.flatten().tolist()))
        return score

    sc.attention(query, key, value, score=function, q_positions=[40, 41], kv_positions=[0, 7, 40, 41])
    assert seen[-1] == ([40, 41], [0, 7, 40, 41])


@pytest.mark.parametrize(
    ("q_positions", "kv_positions", "first"),
    [
        (None, None, (2, 0)),
        (range(40, 42), range(7, 11), (40, 7)),
        ([40, 41], [3, 7, 40, 41], (40, 3)),
        ([0, 41], [0, 7, 40, 41], (0, 0)),
        ([[-1, 41]], [[-1, 7, 40, 41]], (0, 0)),
    ],
)
@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16])
def test_it_is_first_asked_about_the_first_pair(q_positions, kv_positions, first, dtype):
    query, key, _ = inputs(q_len=2, kv_len=4, batch=1, dtype=dtype)
    seen = []

    def function(*asked):
        seen.append(asked)
        return asked[0]

    sc.AttentionMatrix(query, key, score=function, q_positions=q_positions, kv_positions=kv_positions)
    (asked,) = seen
    wide = torch.float64 if dtype == torch.float64 else torch.float32
    assert [x.dtype for x in asked] == [wide, *[torch.int64] * 4]
    assert [x.shape for x in asked] == [(1, 1, 1, 1)] * 5
    assert [x.item() for x in asked] == [0, 0, 0, *first]


def test_it_is_asked_on_the_device_of_the_scores():
    seen = []

    def function(*asked):
        seen.extend(x.device.type for x in asked)
        return asked[0]

    x = torch.empty(1, 2, 3, 8, device="meta")
    sc.AttentionMatrix(x, x, score=function)
    assert seen == ["meta"] * 5


@pytest.mark.parametrize("impl", ["tiled", "reference"])
def test_scores_may_go_unread_where_something_else_is_trained(impl):
    tensors = inputs()
    leaves = table, others = [torch.randn(4, dtype=torch.float64, requires_grad=True) for _ in range(2)]

    def function(score, b, h, q, kv):
        return table[h] * (q - kv) + (others[h] * torch.ones_like(score)) * table[h] * b

    out = sc.attention(*tensors, score=function, impl=impl)
    grad = torch.randn_like(out)
    got = torch.autograd.grad(out, [*leaves, tensors[2]], grad)
    expected = dense(function, *tensors, masks.Full())
    for own, their in zip(got, torch.autograd.grad(expected, [*leaves, tensors[2]], grad), strict=True):
        torch.testing.assert_close(own, their)


def test_tensors_captured_by_a_function_are_detected():
    """A leaf that comes after what needs no gradient, and one by two ways."""
    first, last = (torch.ones(3, requires_grad=True) for _ in range(2))
    place = (torch.zeros(1, 1, 1, 1, dtype=torch.int64),) * 4
    made = Modification.of(lambda score, b, h, q, kv: (first * last * score + last)[..., :1], place, torch.float32)
    assert {id(x) for x in made.leaves} == {id(first), id(last)}
    assert len(made.leaves) == 2
    assert Modification.of(lambda score, b, h, q, kv: score, place, torch.float32).leaves == ()


@pytest.mark.parametrize("own", [torch.float16, torch.float32, torch.float64])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_answers_are_taken_in_the_dtype_of_the_scores(own, dtype):
    place = tuple(
        torch.arange(n).view([n if i == axis else 1 for i in range(4)]) for axis, n in enumerate((1, 2, 3, 4))
    )
    given = torch.randn(1, 2, 3, 4, dtype=dtype)
    kept = Modification(lambda score, b, h, q, kv: (h * q).to(own))
    answer = kept(given, place)
    assert (answer.dtype, answer.shape) == (dtype, given.shape)
    assert torch.equal(answer, (place[1] * place[2]).to(dtype).expand(1, 2, 3, 4))


@pytest.mark.ci
def test_a_compiled_program_goes_around_it():
    query, key, value = (x.detach().float() for x in inputs())

    def run(query, key, value):
        return sc.attention(query, key, value * 2, score=lambda score, b, h, q, kv: score - (q - kv).abs()) + 1

    torch.testing.assert_close(torch.compile(run, backend="eager")(query, key, value), run(query, key, value))


REFUSED = {
    "a mask": (masks.Causal(), "score must be a saccade Score, a function (score, b, h, q, kv) -> score, or None"),
    "a class": (scores.Dot, "got Dot"),
    "a tensor": (torch.zeros(3), "a tensor or a position bias as bias="),
    "a bias": (sc.positions.ALiBi(4), "a tensor or a position bias as bias="),
    "an answer for a mask": (lambda score, b, h, q, kv: q > kv, "pass it as mask="),
    "a number": (lambda score, b, h, q, kv: 3.0, "must return a number for each score"),
    "fewer numbers": (lambda score, b, h, q, kv: torch.zeros(9, 5, 3, 2), "[9, 5, 3, 2] for [1, 1, 1, 1]"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_a_wrong_function_of_scores_is_refused(name):
    score, words = REFUSED[name]
    with pytest.raises((TypeError, ValueError), match=re.escape(words)):
        sc.attention(*inputs(), score=score)


def test_kernels_without_it_give_a_reason():
    query, key, value = inputs()
    matrix = sc.AttentionMatrix(query, key, score=lambda score, b, h, q, kv: score)
    for impl in ("fused", "flex"):
        with pytest.raises(UnsupportedError, match="it does not call functions of scores"):
            sc.attention(query, key, value, score=lambda score, b, h, q, kv: score, impl=impl)
    assert "tiled" in str(matrix.explain())
    with pytest.raises(UnsupportedError, match="vmap"):
        torch.vmap(lambda x: sc.attention(x, key, value, score=lambda score, b, h, q, kv: score))(query[None])


@pytest.mark.parametrize("score", [None, scores.Cosine(), scores.Dot(scaled=False)], ids=str)
def test_written_out_they_are_what_the_softmax_is_taken_of(score):
    torch.manual_seed(0)
    query, key = torch.randn(2, 4, 5, 8), torch.randn(2, 2, 7, 8)
    own = scores.Modified(lambda score, b, h, q, kv: score * (1 + h) - (q - kv).abs(), score)
    torch.testing.assert_close(own.to_dense(query, key), sc.AttentionMatrix(query, key, score=own).scores.to_dense())
    nothing = scores.Modified(lambda score, b, h, q, kv: torch.tensor(3.0))
    assert torch.equal(nothing.to_dense(query, key), torch.full((2, 4, 5, 7), 3.0))
