"""A linear model that each token trains by a step of gradient descent is the delta rule: biases, residuals, batches."""

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

from saccade import masks
from saccade.caches.recurrent import Memory
from saccade.mechanisms import Delta

LENGTH, WIDTH, OUT = 40, 5, 5


def draw() -> tuple[Tensor, ...]:
    """Query, key, value and learning rate of one head, and the weights before the first token."""
    torch.manual_seed(0)
    query, key, value = torch.randn(3, LENGTH, WIDTH, dtype=torch.float64)
    rate = torch.rand(LENGTH, dtype=torch.float64)
    return query, F.normalize(key, dim=-1), value, rate, torch.randn(WIDTH + 1, OUT, dtype=torch.float64)


def trained(query: Tensor, key: Tensor, value: Tensor, rate: Tensor, weight: Tensor, batch: int = 1) -> Tensor:
    """Gradient descent on ½ ‖Wᵀ k − v‖²; the tokens of a batch compute their gradients at the same weights."""
    out: list[Tensor] = []
    for start in range(0, LENGTH, batch):
        held = weight.detach().requires_grad_()
        for t in range(start, start + batch):
            loss = 0.5 * (key[t] @ held - value[t]).square().sum()
            weight = weight - rate[t] * torch.autograd.grad(loss, held)[0]
            out.append(query[t] @ weight)
    return torch.stack(out)


def delta(query: Tensor, key: Tensor, value: Tensor, rate: Tensor, weight: Tensor) -> Tensor:
    rule = Delta(scale=1.0)(query[None, None], key[None, None], beta=rate[None, None], mask=masks.Causal())
    return rule.advance(value[None, None], Memory(weight[None, None]))[0][0, 0]


@pytest.mark.parametrize("has_bias", [False, True])
def test_a_step_for_each_token_is_the_delta_rule(has_bias: bool) -> None:
    query, key, value, rate, weight = draw()
    if has_bias:
        query, key = (F.pad(x, (0, 1), value=1.0) for x in (query, key))
    tokens = query, key, value, rate, weight[: key.shape[1]]
    torch.testing.assert_close(delta(*tokens), trained(*tokens))


def test_a_residual_connection_is_the_delta_rule_of_what_it_leaves() -> None:
    query, key, value, rate, weight = draw()
    held, expected = weight[:WIDTH], []
    for q, k, v, eta in zip(query, key, value, rate, strict=True):
        held = held.detach().requires_grad_()
        loss = 0.5 * (k + k @ held - v).square().sum()
        held = held - eta * torch.autograd.grad(loss, held)[0]
        expected.append(q + q @ held)
    own = delta(query, key, value - key, rate, weight[:WIDTH]) + query
    torch.testing.assert_close(own, torch.stack(expected))


def test_batches_are_the_delta_rule_if_their_keys_are_orthogonal_and_not_otherwise() -> None:
    query, key, value, rate, weight = draw()
    orthogonal = torch.eye(WIDTH, dtype=torch.float64).repeat(LENGTH // WIDTH, 1)
    for keys, is_equal in ((orthogonal, True), (key, False)):
        tokens = query, keys, value, rate, weight[:WIDTH]
        difference = (delta(*tokens) - trained(*tokens, batch=WIDTH)).abs().max()
        assert (difference < 1e-10) == is_equal
