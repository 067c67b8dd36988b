"""Every kernel has second derivatives, and they are those of the definition."""

import pytest
import torch
from tests.engine.kernels.native_levels import NATIVE
from tests.sampled import sampled
from torch import Tensor

import saccade as sc
from saccade import masks, positions, scores
from saccade.engine.kernels import tiled_cost
from saccade.scores import Additive
from saccade.testing import CASES
from saccade.testing.problem import Problem

TWICE = [case for case in CASES if not isinstance(case.score, Additive)]


def ours(problem: Problem, impl: str = "auto") -> tuple[Tensor, Tensor]:
    return sc.attention_with_lse(
        problem.query, problem.key, problem.value, problem.mask, impl=impl, **problem.options, **problem.positions
    )


def leaves_of(problem: Problem) -> list[Tensor]:
    found = [problem.query, problem.key, problem.value, *problem.parameters().values()]
    return found if problem.bias is None else [*found, problem.bias]


def penalised(out: Tensor, lse: Tensor, leaves: list[Tensor], order: int = 2) -> list[Tensor]:
    """Gradients of all leaves, and of the gradient that came in, of a penalty on all gradients."""
    generator = torch.Generator().manual_seed(7)
    come_in = torch.randn(out.shape, generator=generator, dtype=torch.float64).to(out).requires_grad_()
    seen = lse.detach() > -torch.inf
    of_lse = torch.randn(lse.shape, generator=generator, dtype=torch.float64).to(lse)
    target = (out * come_in).sum() + (lse.masked_fill(~seen, 0.0) * of_lse).sum()
    for _ in range(order - 1):
        grads = torch.autograd.grad(target, leaves, create_graph=True, allow_unused=True)
        kept = [grad for grad in grads if grad is not None and grad.requires_grad]
        target = sum((grad * torch.randn(grad.shape, generator=generator).to(grad)).cos().sum() for grad in kept)
    found = torch.autograd.grad(target, [*leaves, come_in], allow_unused=True)
    return [torch.zeros_like(x) if grad is None else grad for x, grad in zip([*leaves, come_in], found, strict=True)]


def same(got: list[Tensor], want: list[Tensor], **tolerances: float) -> None:
    for own, other in zip(got, want, strict=True):
        torch.testing.assert_close(own, other, **tolerances)


@pytest.mark.parametrize("case", sampled(TWICE, 3), ids=str)
def test_they_are_those_of_the_definition(case):
    problem = case.problem().leaves(bias=True, parameters=True)
    leaves = leaves_of(problem)
    same(penalised(*ours(problem), leaves), penalised(*problem.truth(), leaves), rtol=1e-7, atol=1e-9)


@pytest.mark.parametrize("case", sampled(TWICE, 6), ids=str)
def test_third_ones_are_those_of_the_definition(case):
    problem = case.problem().leaves(bias=True, parameters=True)
    leaves = leaves_of(problem)
    same(penalised(*ours(problem), leaves, 3), penalised(*problem.truth(), leaves, 3), rtol=1e-6, atol=1e-8)


SEVERAL = [
    case for case in TWICE if case.name in ("documents-rule", "capped", "biased-keys", "ragged", "sink-empty-rows")
]


@pytest.mark.parametrize("impl", ["fused", "matmul", "tiled", "reference", "sdpa"])
@pytest.mark.parametrize("case", SEVERAL, ids=str)
def test_kernels_asked_for_by_name_have_them(case, impl):
    problem = case.problem().leaves()
    leaves = [problem.query, problem.key, problem.value]
    try:
        results = ours(problem, impl)
    except sc.UnsupportedError as refused:
        pytest.skip(f"{impl}: {refused.reasons[0]}")
    same(penalised(*results, leaves), penalised(*problem.truth(), leaves), rtol=1e-7, atol=1e-9)


def inputs(n: int = 40, dtype: torch.dtype = torch.float64, width: int = 8) -> list[Tensor]:
    return [torch.randn(2, heads, n, width, dtype=dtype).requires_grad_() for heads in (4, 2, 2)]


def twice(call, tensors: list[Tensor]) -> tuple[Tensor, ...]:
    """Gradients of a penalty on the gradients of a sum of cosines."""
    first = torch.autograd.grad(call(*tensors).cos().sum(), tensors, create_graph=True)
    return torch.autograd.grad(sum(grad.square().sum() for grad in first), tensors)


@pytest.mark.parametrize("mask", [None, masks.Causal()], ids=str)
def test_torchs_own_kernel_has_them(mask):
    tensors = inputs()
    got = twice(lambda *x: sc.attention(*x, mask, impl="sdpa"), tensors)
    same(got, twice(lambda *x: sc.attention(*x, mask, impl="reference"), tensors))
    out = sc.attention(*tensors, mask, impl="sdpa")
    out.mul_(2.0)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        out.sum().backward()


@pytest.mark.parametrize("impl", ["auto", "tiled", NATIVE])
@pytest.mark.parametrize("dtype, tolerance", [(torch.float32, 1e-4), (torch.bfloat16, 0.1)], ids=str)
@pytest.mark.parametrize(
    "mask", [masks.Causal() & (masks.Window(9, 0) | masks.Strided(7)), masks.Window(4, 4)], ids=str
)
def test_every_kernel_in_every_dtype(mask, dtype, tolerance, impl):
    tensors = inputs(60, dtype)
    try:
        got = twice(lambda *x: sc.attention(*x, mask, impl=impl), tensors)
    except sc.UnsupportedError as refused:
        pytest.skip(f"{impl}: {refused.reasons[0]}")
    wide = [x.detach().double().requires_grad_() for x in tensors]
    for own, other in zip(got, twice(lambda *x: sc.attention(*x, mask, impl="reference"), wide), strict=True):
        assert own.dtype == dtype
        assert (own.double() - other).norm() / other.norm() < tolerance


@pytest.mark.parametrize("impl", ["auto", "tiled"])
def test_dropout_leaves_out_the_same_weights(impl):
    tensors = inputs()

    def run(own: str):
        return lambda *x: sc.AttentionMatrix(*x[:2], masks.Causal(), impl=own).matmul(x[2], dropout_p=0.3, seed=5)

    same(twice(run(impl), tensors), twice(run("reference"), tensors))


def test_tensors_that_a_score_mod_reads_have_second_derivatives():
    tensors, table = inputs(), torch.randn(4, 79, dtype=torch.float64, requires_grad=True)

    def run(impl: str) -> tuple[Tensor, ...]:
        def modify(score: Tensor, b: Tensor, h: Tensor, q: Tensor, kv: Tensor) -> Tensor:
            return score * table[h, q - kv + 39].sigmoid()

        out = sc.attention(*tensors, masks.Causal(), score=modify, impl=impl)
        first = torch.autograd.grad(out.cos().sum(), [*tensors, table], create_graph=True)
        return torch.autograd.grad(sum(grad.square().sum() for grad in first), [*tensors, table])

    same(run("auto"), run("reference"))


@pytest.mark.parametrize("bad", [float("nan"), float("inf"), 1e30])
def test_hidden_pairs_do_not_reach_second_derivatives(bad):
    query, key, value = (x.detach().float() for x in inputs(12))
    allowed = torch.ones(12, 12, dtype=torch.bool).tril()
    allowed[:, 5], allowed[7] = False, False
    clean = twice(lambda *x: sc.attention(*x, allowed), [x.clone().requires_grad_() for x in (query, key, value)])
    key[:, :, 5], value[:, :, 5] = bad, bad
    if bad != 1e30:
        query[:, :, 7] = bad
    same(twice(lambda *x: sc.attention(*x, allowed), [x.requires_grad_() for x in (query, key, value)]), list(clean))


@pytest.mark.parametrize("entries", [1, 200, 1 << 20])
def test_blocks_of_any_size_give_the_same(entries, monkeypatch):
    tensors, mask = inputs(), masks.longformer(4, [0]) & masks.Padding([40, 33])
    want = twice(lambda *x: sc.attention(*x, mask, impl="reference"), tensors)
    monkeypatch.setattr(tiled_cost, "_ENTRIES", entries)
    same(
        twice(lambda *x: sc.attention(*x, mask, bias=positions.ALiBi(4)), tensors),
        list(twice(lambda *x: sc.attention(*x, mask, bias=positions.ALiBi(4), impl="reference"), tensors)),
    )
    same(twice(lambda *x: sc.attention(*x, mask), tensors), list(want))


def test_finite_differences_agree():
    tensors = [x.detach()[:1, :, :4, :3].requires_grad_() for x in inputs()]
    bias = torch.randn(1, 4, 4, 4, dtype=torch.float64, requires_grad=True)

    def run(query: Tensor, key: Tensor, value: Tensor, bias: Tensor) -> tuple[Tensor, Tensor]:
        return sc.attention_with_lse(query, key, value, masks.Causal(), bias=bias, softcap=2.0)

    assert torch.autograd.gradgradcheck(run, [*tensors, bias])


@pytest.mark.parametrize("score", [scores.Bilinear(8, 8), scores.Cosine(), scores.Gaussian(trainable=True)], ids=repr)
def test_scores_have_them(score):
    score, tensors = score.double(), inputs()
    leaves = [*tensors, *score.parameters()]

    def run(impl: str) -> tuple[Tensor, ...]:
        return twice(lambda *x: sc.attention(*x[:3], masks.Causal(), score=score, impl=impl), leaves)

    same(run("auto"), list(run("reference")))
