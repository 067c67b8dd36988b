"""Gated DeltaNet-2's rule: the published recurrence with both gates, its relation to the delta rule, and its state."""

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

from saccade import masks
from saccade.mechanisms import Delta, GatedDelta2

CAUSAL = masks.Causal()


def draw(length: int, key_heads: int = 2) -> tuple[Tensor, ...]:
    """Query, key, value, decay, erase and write gates; two query heads, five channels of keys, three of values."""
    torch.manual_seed(0)

    def normal(heads: int, width: int) -> Tensor:
        return torch.randn(2, heads, length, width, dtype=torch.float64)

    query, key, value = normal(2, 5), F.normalize(normal(key_heads, 5), dim=-1), normal(key_heads, 3)
    decay, erase, write = -F.softplus(normal(key_heads, 5)), normal(key_heads, 5).sigmoid(), normal(key_heads, 3)
    return query, key, value, decay, erase, write.sigmoid()


def defined(
    query: Tensor, key: Tensor, value: Tensor, decay: Tensor, erase: Tensor, write: Tensor, scale: float
) -> Tensor:
    """The recurrence as its paper has it: the whole transition matrix of each token."""
    state, out, eye = query.new_zeros(2, 2, 5, 3), [], torch.eye(5, dtype=query.dtype)
    for t in range(query.shape[2]):
        k, b, w, v = key[:, :, t], erase[:, :, t], write[:, :, t], value[:, :, t]
        transition = (eye - k[..., None] * (b * k)[..., None, :]) @ torch.diag_embed(decay[:, :, t].exp())
        state = transition @ state + k[..., None] * (w * v)[..., None, :]
        out.append(scale * (state.mT @ query[:, :, t, :, None])[..., 0])
    return torch.stack(out, 2)


@pytest.mark.parametrize("length", [1, 33, 300])
def test_products_and_gradients_are_those_of_the_definition(length: int) -> None:
    leaves = [x.requires_grad_() for x in draw(length)]
    query, key, value, decay, erase, write = leaves
    out = GatedDelta2(scale=0.7)(query, key, decay=decay, erase=erase, mask=CAUSAL) @ (write * value)
    expected = defined(*leaves, scale=0.7)
    torch.testing.assert_close(out, expected, atol=1e-10, rtol=0)
    grad = torch.randn_like(out)
    own, theirs = (torch.autograd.grad(x, leaves, grad) for x in (out, expected))
    torch.testing.assert_close(own, theirs, atol=1e-9, rtol=1e-9)


def test_equal_gates_are_the_delta_rule() -> None:
    query, key, value, decay, _, _ = draw(70)
    beta = torch.rand(2, 2, 70, dtype=torch.float64)
    erase = beta[..., None].expand_as(key)
    own = GatedDelta2()(query, key, decay=decay, erase=erase, mask=CAUSAL) @ (beta[..., None] * value)
    torch.testing.assert_close(own, Delta()(query, key, decay=decay, beta=beta, mask=CAUSAL) @ value)
    whole = GatedDelta2()(query, key, mask=CAUSAL) @ value
    torch.testing.assert_close(whole, Delta()(query, key, mask=CAUSAL) @ value)


def test_queries_may_have_more_heads_than_keys() -> None:
    query, key, value, decay, erase, write = draw(40, key_heads=1)
    out = GatedDelta2()(query, key, decay=decay, erase=erase, mask=CAUSAL) @ (write * value)
    wide = (x.expand(-1, 2, -1, -1) for x in (key, value, decay, erase, write))
    torch.testing.assert_close(out, defined(query, *wide, scale=5**-0.5), atol=1e-10, rtol=0)


def test_two_tokens_that_take_turns_enlarge_the_state_by_a_fifth() -> None:
    high, low = 0.8**0.5, 0.2**0.5
    keys = torch.tensor([[low, high], [high, low]], dtype=torch.float64).repeat(20, 1)[None, None]
    erase = torch.eye(2, dtype=torch.float64).repeat(20, 1)[None, None]
    matrix = GatedDelta2(scale=1.0)(keys, keys, erase=erase, mask=CAUSAL)
    assert matrix[0, 0, 39, 0] / matrix[0, 0, 37, 0] > 1.2
    bounded = Delta(scale=1.0)(keys, keys, mask=CAUSAL)
    assert bounded[0, 0, 39, 0].abs() < 1.0


@pytest.mark.parametrize("erase", [torch.rand(2, 2, 3), torch.ones(2, 2, 3, 5, dtype=torch.int64)])
def test_wrong_gates_are_refused(erase: Tensor) -> None:
    query, key, *_ = draw(3)
    with pytest.raises(ValueError, match=r"erase must be floats \[2, 2, 3, 5\], like key"):
        GatedDelta2()(query, key, erase=erase, mask=CAUSAL)
