"""Beside torch's own tools: autocast, compilation, checkpointing, inference mode, copies, threads."""

import copy
import pickle
import threading

import pytest
import torch
from tests.masks.test_masks import ATOMS
from torch.utils.checkpoint import checkpoint

import saccade as sc
from saccade import masks
from saccade.testing import oracle

MASK = masks.Causal() & (masks.Window(3, 0) | masks.Global([0]))


def test_autocast_casts_projections_and_never_scores() -> None:
    mha = sc.nn.MultiHeadAttention(16, 4, mask=MASK)
    x = torch.randn(2, 9, 16)
    with torch.autocast("cpu", torch.bfloat16):
        out = mha(x)
        matrix = mha.matrix(x)
        dense = matrix.to_dense()
        inside = matrix.lse, matrix.mT @ torch.ones(2, 4, 9, 1, dtype=torch.bfloat16)
    assert out.dtype == torch.bfloat16
    assert dense.dtype == torch.float32
    torch.testing.assert_close(dense, matrix.to_dense(), rtol=0, atol=0)
    torch.testing.assert_close(inside[0], sc.AttentionMatrix(matrix.scores.query, matrix.scores.key, MASK).lse)
    torch.testing.assert_close(inside[1].float(), dense.sum(2)[..., None], rtol=1e-2, atol=1e-2)


@pytest.mark.parametrize("impl", ["fused", "reference"])
def test_autocast_does_not_reach_into_a_product(impl: str) -> None:
    q, k, v = (torch.randn(1, 2, 9, 8) for _ in range(3))
    expected = sc.attention(q, k, v, MASK, impl=impl)
    with torch.autocast("cpu", torch.bfloat16):
        assert torch.equal(sc.attention(q, k, v, MASK, impl=impl), expected)


def test_the_probe_answers_the_same_whatever_is_switched_on() -> None:
    with torch.autocast("cpu", torch.bfloat16):
        assert sc.kernels.aten.is_available.__wrapped__()
        assert sc.kernels.aten.reads_groups.__wrapped__() == sc.kernels.aten.reads_groups()
    before = torch.get_default_dtype()
    torch.set_default_dtype(torch.float64)
    try:
        available = sc.kernels.aten.is_available.__wrapped__()
    finally:
        torch.set_default_dtype(before)
    assert available


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("mask", [None, masks.Causal(), masks.Window(3, 3), MASK], ids=str)
def test_compiled_functions_give_the_same(mask: masks.Mask | None) -> None:
    torch.compiler.reset()
    q, k, v = (torch.randn(1, 2, 40, 8, requires_grad=True) for _ in range(3))
    expected = 2 * sc.attention(q, k, v, mask)
    out = torch.compile(lambda q, k, v: 2 * sc.attention(q, k, v, mask), backend="aot_eager")(q, k, v)
    torch.testing.assert_close(out, expected)
    for own, other in zip(*(torch.autograd.grad(x.sum(), (q, k, v)) for x in (out, expected)), strict=True):
        torch.testing.assert_close(own, other)


def test_checkpointing_and_inference_mode() -> None:
    mha = sc.nn.MultiHeadAttention(16, 4, mask=MASK, dropout_p=0.3)
    x = torch.randn(2, 9, 16, requires_grad=True)
    grads = []
    for call in (lambda x: checkpoint(mha, x, use_reentrant=False), mha):
        torch.manual_seed(3)
        grads.append(torch.autograd.grad(call(x).pow(2).sum(), x)[0])
    torch.testing.assert_close(*grads)
    with torch.inference_mode():
        assert mha.eval()(x).shape == x.shape
        assert mha.matrix(x).lse.shape == (2, 4, 9)


@pytest.mark.parametrize("mask", [mask for mask in ATOMS if not isinstance(mask, masks.Predicate)], ids=str)
def test_masks_can_be_copied_and_pickled(mask: masks.Mask) -> None:
    for other in (copy.deepcopy(mask), pickle.loads(pickle.dumps(mask))):
        assert torch.equal(other.to_dense(9, batch=2), mask.to_dense(9, batch=2))


def test_threads_share_plans() -> None:
    errors: list[float] = []

    def work(number: int) -> None:
        generator = torch.Generator().manual_seed(number)
        for turn in range(10):
            n = 20 + (7 * number + turn) % 30
            x = torch.randn(1, 2, n, 8, generator=generator)
            expected, _ = oracle.attention(x, x, x, MASK.to_dense(n).expand(1, 2, n, n))
            errors.append(float((sc.attention(x, x, x, MASK) - expected).abs().max()))

    threads = [threading.Thread(target=work, args=(number,)) for number in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(errors) == 40
    assert max(errors) < 1e-5
