"""Tensors that are what they seem, and those that stand for others."""

import pytest
import torch
from torch import Tensor, nn

from saccade.caches import KVCache
from saccade.masks import Causal
from saccade.mechanisms import Softmax
from saccade.positions import Rotary
from saccade.support.torch_modes import is_plain, is_transformed


def test_plain_tensors() -> None:
    seen = []

    def look(x: Tensor) -> Tensor:
        seen.append((is_plain(x), is_transformed()))
        return x.sum()

    look(torch.ones(2))
    look(nn.Parameter(torch.ones(2)))
    torch.func.grad(look)(torch.ones(2))
    torch.func.vmap(look)(torch.ones(2, 2))
    with torch._subclasses.FakeTensorMode():
        look(torch.ones(2))
    assert seen == [(True, False), (True, False), (False, True), (False, True), (False, False)]


@pytest.mark.filterwarnings("ignore:.torch.jit.script. is deprecated")
def test_angles_made_in_a_transform_do_not_outlive_it() -> None:
    rotary, x = Rotary(8), torch.randn(1, 1, 5, 8)

    def many(y: Tensor) -> Tensor:
        return rotary(y, range(300, 305)).pow(3).sum()

    def one(y: Tensor) -> Tensor:
        return rotary(y[:, :, :1], range(300, 301)).pow(3).sum()

    for f in (many, one):
        before = torch.func.hessian(f)(x)
        grad = torch.func.grad(f)(x)
        y = x.clone().requires_grad_()
        f(y).backward()
        torch.testing.assert_close(grad, y.grad)
        torch.testing.assert_close(torch.func.hessian(f)(x), before)


def test_a_long_cache_under_vmap() -> None:
    def attended(key: Tensor) -> Tensor:
        return KVCache().attend(Softmax(), key, key, key, mask=Causal())

    keys = torch.randn(2, 1, 1, 8192, 64)
    together = torch.func.vmap(attended)(keys)
    torch.testing.assert_close(together[1], attended(keys[1]))
