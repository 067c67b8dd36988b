"""The measure behind the law of cost sees what is made anywhere, and does not count what was there before."""

import pytest
import torch

from saccade.testing.largest_tensor import largest_tensor

LIBRARY = torch.library.Library("saccade_test_memory", "DEF")
LIBRARY.define("gram_sum(Tensor x) -> Tensor")
LIBRARY.impl("gram_sum", lambda x: (x @ x.T).sum(), "CPU")


class Gram(torch.autograd.Function):
    """Forward is thrifty; backward makes the square."""

    @staticmethod
    def forward(ctx, x):
        ctx.save_for_backward(x)
        return x.sum()

    @staticmethod
    def backward(ctx, upstream):
        (x,) = ctx.saved_tensors
        return upstream * (x @ x.T) @ x


@pytest.mark.parametrize(
    "compute",
    [
        lambda x: (x @ x.T).sum(),
        torch.ops.saccade_test_memory.gram_sum,
        lambda x: Gram.apply(x.requires_grad_()).backward(),
    ],
    ids=["plain", "inside a custom operation", "backward"],
)
def test_a_square_is_seen(compute):
    assert largest_tensor(lambda: compute(torch.ones(32, 2))) == 32 * 32 * 4


def test_views_of_what_is_there_cost_nothing():
    x = torch.ones(64, 64)
    assert largest_tensor(lambda: x.T[:2].sum(1)) == 2 * 4
