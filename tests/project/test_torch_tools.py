"""Tests with torch's own tools: autocast, transforms, checkpointing, inference mode, copies, threads."""

import copy
import gc
import pickle
import threading
import weakref

import pytest
import torch
from tests.engine.kernels.native_levels import NATIVE
from tests.masks.test_masks import ATOMS
from torch import func
from torch.utils.checkpoint import checkpoint

import saccade as sc
from saccade import masks
from saccade.masks.convert.serialize import encode
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
    torch.testing.assert_close(inside[0], sc.AttentionMatrix(matrix.inputs.query, matrix.inputs.key, MASK).lse)
    torch.testing.assert_close(inside[1].float(), dense.sum(2)[..., None], rtol=1e-2, atol=1e-2)


@pytest.mark.parametrize("impl", ["fused", "reference", NATIVE])
def test_autocast_does_not_reach_into_a_product(impl: str) -> None:
    q, k, v = (torch.randn(1, 2, 9, 8) for _ in range(3))
    expected = sc.attention(q.bfloat16(), k.bfloat16(), v.bfloat16(), MASK, impl=impl)
    with torch.autocast("cpu", torch.bfloat16):
        assert torch.equal(sc.attention(q, k, v, MASK, impl=impl), expected)


def test_the_probe_answers_the_same_whatever_is_switched_on() -> None:
    with torch.autocast("cpu", torch.bfloat16):
        assert sc.engine.kernels.aten_flash.is_available.__wrapped__()
        assert sc.engine.kernels.aten_flash.reads_groups.__wrapped__() == sc.engine.kernels.aten_flash.reads_groups()
    before = torch.get_default_dtype()
    torch.set_default_dtype(torch.float64)
    try:
        available = sc.engine.kernels.aten_flash.is_available.__wrapped__()
    finally:
        torch.set_default_dtype(before)
    assert available


@pytest.mark.ci
def test_the_operations_keep_torch_s_rules() -> None:
    x = torch.randn(1, 2, 6, 4, requires_grad=True)
    program = [0, 0, 0, 0, 0, 0, 0, *encode((masks.Causal(), None))[0]]
    arguments = (x, x, x, [torch.zeros((), dtype=torch.int64)], 0, program, [0.5, 0.0, 0.0], "auto")
    torch.library.opcheck(torch.ops.saccade.product.default, arguments)


def test_functional_gradients_and_maps_equal_plain_ones() -> None:
    tensors = [torch.randn(3, 2, 4, 7, 8, dtype=torch.float64) for _ in range(3)]
    bias = torch.randn(1, 4, 7, 7, dtype=torch.float64)
    for options in ({}, {"softcap": 2.0}, {"bias": bias}, {"sink_logit": torch.randn(4)}):

        def loss(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, options: dict = options) -> torch.Tensor:
            return sc.attention(q, k, v, MASK, **options).sin().sum()

        leaves = [x[0].clone().requires_grad_() for x in tensors]
        expected = torch.autograd.grad(loss(*leaves), leaves)
        for own, other in zip(func.grad(loss, (0, 1, 2))(*(x[0] for x in tensors)), expected, strict=True):
            torch.testing.assert_close(own, other)
        each = [func.grad(loss)(*item) for item in zip(*tensors, strict=True)]
        torch.testing.assert_close(func.vmap(func.grad(loss))(*tensors), torch.stack(each))
        shared = func.vmap(func.grad(loss), (0, None, None))(tensors[0], tensors[1][0], tensors[2][0])
        each = [func.grad(loss)(q, tensors[1][0], tensors[2][0]) for q in tensors[0]]
        torch.testing.assert_close(shared, torch.stack(each))


@pytest.mark.parametrize("sizes", [(1, 4, 7, 7), (2, 4, 7, 7), (2, 1, 1, 7), (7,)])
@pytest.mark.parametrize("is_mapped", [True, False])
def test_gradients_of_a_bias_for_each_sample(sizes: tuple[int, ...], is_mapped: bool) -> None:
    tensors = [torch.randn(3, 2, 4, 7, 8, dtype=torch.float64) for _ in range(3)]
    bias = torch.randn(3, *sizes, dtype=torch.float64)

    def loss(bias: torch.Tensor, *tensors: torch.Tensor) -> torch.Tensor:
        out, lse = sc.attention_with_lse(*tensors, MASK, bias=bias, softcap=2.0)
        return out.sin().sum() + lse.cos().sum()

    asked = func.grad(loss, (0, 1))
    own = func.vmap(asked, (0 if is_mapped else None, 0, 0, 0))(bias if is_mapped else bias[0], *tensors)
    each = [asked(bias[n if is_mapped else 0], *(x[n] for x in tensors)) for n in range(3)]
    for got, want in zip(own, zip(*each, strict=True), strict=True):
        torch.testing.assert_close(got, torch.stack(want))


def test_gradients_for_each_sample_of_a_batch() -> None:
    mha = sc.nn.MultiHeadAttention(16, 4, mask=MASK).double()
    x = torch.randn(5, 1, 6, 16, dtype=torch.float64)
    weights = {name: weight.detach() for name, weight in mha.named_parameters()}

    def loss(weights: dict[str, torch.Tensor], x: torch.Tensor) -> torch.Tensor:
        return func.functional_call(mha, weights, (x,)).pow(2).sum()

    together = func.vmap(func.grad(loss), (None, 0))(weights, x)
    for number, item in enumerate(x):
        for name, own in func.grad(loss)(weights, item).items():
            torch.testing.assert_close(together[name][number], own)


def test_vmap_with_a_seed_drops_what_each_sample_alone_drops() -> None:
    x = torch.randn(3, 2, 4, 7, 8, dtype=torch.float64)

    def dropped(x: torch.Tensor) -> torch.Tensor:
        return sc.AttentionMatrix(x, x, MASK).matmul(x, dropout_p=0.5, seed=5)

    def loss(x: torch.Tensor) -> torch.Tensor:
        return dropped(x).sin().sum()

    torch.testing.assert_close(func.vmap(dropped)(x), torch.stack([dropped(one) for one in x]))
    torch.testing.assert_close(func.vmap(func.grad(loss))(x), torch.stack([func.grad(loss)(one) for one in x]))


def test_arguments_that_vmap_cannot_map_are_refused() -> None:
    x = torch.randn(3, 2, 2, 5, 4)
    score = sc.scores.Additive(4, 4, 3)
    with pytest.raises(sc.UnsupportedError, match="cannot map parameters of a score's own function"):
        func.vmap(lambda x: sc.attention(x, x, x, score=score))(x)
    with pytest.raises(sc.UnsupportedError, match="differs between batch items"):
        func.vmap(lambda x: sc.attention(x, x, x, masks.Padding((2, 5))))(x)


def test_shapes_alone_on_the_meta_device() -> None:
    x = torch.empty(2, 4, 7, 8, device="meta")
    assert sc.attention(x, x, x[..., :3], MASK).shape == (2, 4, 7, 3)
    assert sc.attention(x, x, x).device.type == "meta"


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


@pytest.mark.ci
@pytest.mark.parametrize("impl", ["fused", "tiled", NATIVE])
@pytest.mark.parametrize("bias", [False, True])
def test_saved_tensor_hooks_see_all_tensors(impl: str, bias: bool) -> None:
    """Saved-tensor hooks see every tensor kept for the backward pass, so that checkpointing frees its memory."""
    leaf = torch.randn(1, 2, 64, 16, requires_grad=True)
    made = [leaf * 1.0, leaf * 2.0, leaf * 3.0, *([torch.randn(1, 2, 64, 64)] if bias else [])]
    held = [weakref.ref(x.untyped_storage()) for x in made]
    with torch.autograd.graph.saved_tensors_hooks(lambda x: None, lambda x: x):
        out = sc.attention(*made[:3], masks.Causal(), bias=made[3] if bias else None, impl=impl)
    del made
    gc.collect()
    assert out.requires_grad
    assert [x() for x in held] == [None] * len(held)
