"""Tensors that mechanisms and positions are made with get gradients where they require them."""

import copy

import pytest
import torch
from torch import nn

from saccade import masks
from saccade.mechanisms import GatedLinear, Performer, Softmax
from saccade.nn import MultiHeadAttention
from saccade.positions import Frequencies, RotaryTables

X = torch.randn(1, 4, 6, 8, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
DIRECTIONS = torch.randn(16, 8, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
DECAY = -torch.rand(4, dtype=torch.float64, generator=torch.Generator().manual_seed(2))
LOGITS = torch.randn(4, dtype=torch.float64, generator=torch.Generator().manual_seed(3))
COS, SIN = torch.randn(2, 6, 4, dtype=torch.float64, generator=torch.Generator().manual_seed(4))
MADE = {
    "Performer": (lambda x: Performer(directions=x)(X, X) @ X, DIRECTIONS),
    "Performer, causal": (lambda x: Performer(directions=x)(X, X, mask=masks.Causal()) @ X, DIRECTIONS),
    "Performer, trigonometric": (lambda x: Performer(directions=x, kind="trigonometric")(X, X) @ X, DIRECTIONS),
    "GatedLinear": (lambda x: GatedLinear(x)(X, X, mask=masks.Causal()) @ X, DECAY),
    "Softmax, sink": (lambda x: Softmax(sink_logit=x)(X, X) @ X, LOGITS),
    "RotaryTables, cos": (lambda x: RotaryTables(x, SIN)(X, range(6)), COS),
    "RotaryTables, sin": (lambda x: RotaryTables(COS, x)(X, range(6)), SIN),
}


@pytest.mark.ci
@pytest.mark.parametrize("name", MADE)
def test_gradients_are_those_of_finite_differences(name):
    call, values = MADE[name]
    torch.testing.assert_close(call(values.clone().requires_grad_()), call(values))  # the ordinary output
    assert torch.autograd.gradcheck(call, values.clone().requires_grad_())


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_directions_train_in_any_dtype(dtype):
    directions = nn.Parameter(DIRECTIONS.to(dtype))
    layer = MultiHeadAttention(16, 2, mechanism=Performer(directions=directions))
    assert any(x is directions for x in layer.parameters())
    out = layer(torch.randn(2, 6, 16))
    out.sum().backward()
    assert directions.grad is not None
    assert bool((directions.grad != 0).any())
    assert torch.equal(copy.deepcopy(layer).state_dict()["mechanism.directions"], directions)


def test_directions_that_were_trained_are_used():
    directions = DIRECTIONS.clone().requires_grad_()
    performer = Performer(directions=directions)
    before = performer(X, X) @ X
    with torch.no_grad():
        directions.mul_(2.0)
    torch.testing.assert_close(performer(X, X) @ X, Performer(directions=2.0 * DIRECTIONS)(X, X) @ X)
    assert not torch.equal(before, performer(X, X) @ X)


def test_copies_are_made_of_what_is_not_trained():
    directions = DIRECTIONS.clone()
    performer = Performer(directions=directions)
    want = performer(X, X) @ X
    directions.zero_()
    torch.testing.assert_close(performer(X, X) @ X, want)


def test_numbers_that_cannot_have_a_gradient_are_refused():
    with pytest.raises(ValueError, match=r"radians must not require a gradient; .*\nHint: pass radians.detach"):
        Frequencies(torch.ones(4, requires_grad=True))
