"""Products as functions that autograd and transforms see: what is asked of them, what flows back, what is refused."""

import pytest
import torch
from torch import Tensor
from torch.func import vmap

import saccade as sc
from saccade.engine.kernels.fused import Fused
from saccade.engine.kernels.kernel import Kernel
from saccade.engine.kernels.reference import Reference
from saccade.engine.kernels.tiled import Tiled

BY_HAND = pytest.mark.parametrize("impl", ["tiled", "fused", "matmul"])


@BY_HAND
@pytest.mark.parametrize("number", range(3), ids=["query", "key", "value"])
def test_gradients_of_one_input_alone(number: int, impl: str) -> None:
    tensors = [torch.randn(1, 2, 5, 4, dtype=torch.float64) for _ in range(3)]
    tensors[number].requires_grad_()
    query, key, value = tensors
    upstream = torch.randn(1, 2, 5, 4, dtype=torch.float64)
    want = torch.autograd.grad((query @ key.mT / 2.0).softmax(-1) @ value, tensors[number], upstream)
    got = torch.autograd.grad(sc.attention(*tensors, impl=impl), tensors[number], upstream)
    torch.testing.assert_close(got, want)


@BY_HAND
@pytest.mark.parametrize("length", [7, 200])
def test_a_backward_pass_within_autocast_is_that_outside(impl: str, length: int) -> None:
    leaves = [torch.randn(1, 2, length, 8, requires_grad=True) for _ in range(3)]

    def grads(*, is_within: bool) -> tuple[Tensor, ...]:
        with torch.autocast("cpu", torch.bfloat16):
            loss = sc.attention(*leaves, impl=impl).float().square().sum()
            if is_within:
                return torch.autograd.grad(loss, leaves)
        return torch.autograd.grad(loss, leaves)

    assert all(map(torch.equal, grads(is_within=True), grads(is_within=False)))


class _Ended(torch.autograd.Function):
    """The same tensor, of which nothing flows back."""

    @staticmethod
    def forward(ctx: object, x: Tensor) -> Tensor:
        return x.clone()

    @staticmethod
    def backward(ctx: object, grad: Tensor) -> None:
        return None


@BY_HAND
def test_without_gradients_nothing_is_passed_on(impl: str) -> None:
    leaves = [torch.randn(1, 2, 5, 4, requires_grad=True) for _ in range(3)]
    results = [_Ended.apply(x) for x in sc.attention_with_lse(*leaves, impl=impl)]
    total = sum(x.sum() for x in results)
    assert torch.autograd.grad(total, leaves, allow_unused=True) == (None, None, None)


def test_a_limit_of_vmap_is_reported_for_a_predicate_mask() -> None:
    x = torch.randn(3, 1, 2, 4, 4)

    def attended(x: Tensor) -> Tensor:
        return sc.attention(x, x, x, lambda b, h, q, kv: kv <= q, score=lambda score, b, h, q, kv: score + b)

    with pytest.raises(sc.UnsupportedError, match="vmap cannot pass the batch item to a function of scores"):
        vmap(attended)(x)


@pytest.mark.parametrize("kernel", [Tiled(), Fused(), Reference()], ids=lambda kernel: kernel.name)
def test_outputs_are_in_the_dtype_of_the_value_and_their_lse_in_that_of_scores(kernel: Kernel) -> None:
    for dtype, wide in ((torch.bfloat16, torch.float32), (torch.float32,) * 2, (torch.float64,) * 2):
        x = torch.randn(1, 2, 5, 4, dtype=dtype)
        out, lse = kernel.forward(sc.AttentionMatrix(x, x).inputs, x, None)
        assert (out.dtype, lse.dtype) == (dtype, wide)
