"""Weights that a model's own code reads or returns are those of the attention that saccade has run in its place."""

import copy

import pytest
import torch
from torch import nn
from torch.autograd import Function
from torch.nn import functional as F

import saccade as sc
from saccade import masks
from saccade.support.errors import UnsupportedError

N, HEADS, WIDTH = 9, 4, 16
ALLOWED = (torch.arange(N)[:, None] - torch.arange(N)).abs() <= 2


class Reader(nn.Module):
    """Attention that returns what it has read of its weights."""

    def __init__(self, read):
        super().__init__()
        self.qkv, self.read, self.allowed = nn.Linear(WIDTH, 3 * WIDTH), read, None

    def forward(self, x):
        q, k, v = self.qkv(x).unflatten(-1, (3, HEADS, -1)).permute(2, 0, 3, 1, 4)
        scores = q @ k.mT / 2
        weights = scores.softmax(-1) if self.allowed is None else scores.masked_fill(~self.allowed, -1e9).softmax(-1)
        return weights @ v, self.read(weights)


class Block(nn.Module):
    def __init__(self, read):
        super().__init__()
        self.attn = Reader(read)

    def forward(self, x):
        return self.attn(x)


READ = {
    "returned": lambda w: w,
    "averaged": lambda w: w.mean(1),
    "transposed": lambda w: w.transpose(1, 2),
    "cast": lambda w: w.double(),
    "dropped out": lambda w: F.dropout(w, 0.0, training=False),
    "one head": lambda w: w[:, 1],
    "detached": lambda w: w.detach(),
    "entropy": lambda w: -(w * (w + 1e-9).log()).sum(-1),
}


@pytest.fixture(params=READ.values(), ids=READ)
def model(request):
    torch.manual_seed(0)
    return Block(request.param)


def masked(model):
    """Return a copy of the model that masks its own scores."""
    changed = copy.deepcopy(model)
    changed.attn.allowed = ALLOWED
    return changed


def results(model, x):
    out, read = model(x)
    draw = torch.Generator().manual_seed(1)
    loss = sum((y * torch.randn(y.shape, generator=draw)).sum() for y in (out, read))
    return out, read, *torch.autograd.grad(loss, [x, *model.parameters()])


def assert_same(ours, theirs):
    for a, b in zip(ours, theirs, strict=True):
        assert a.dtype == b.dtype
        torch.testing.assert_close(a, b)


def test_a_mask_of_replace_attention(model):
    x = torch.randn(2, N, WIDTH, requires_grad=True)
    expected = results(masked(model), x)
    sc.replace_attention(model, mask=masks.sliding_window(3) | masks.Window(2, 2))
    assert_same(results(model, x), expected)


def test_a_mask_of_intervene(model):
    x = torch.randn(2, N, WIDTH, requires_grad=True)
    with sc.intervene(model) as edit:
        edit.mask("attn", None, masks.Window(2, 2))
        found = results(model, x)
    assert_same(found, results(masked(model), x))


def test_scaled_outputs_leave_the_weights(model):
    x = torch.randn(2, N, WIDTH)
    with torch.no_grad(), sc.intervene(model) as edit:
        edit.scale("attn", 1, 0.0)
        _, weights = model(x)
    with torch.no_grad():
        torch.testing.assert_close(weights, model(x)[1])


def test_the_same_weights_multiply_twice():
    torch.manual_seed(0)
    model, x = Block(lambda w: w @ torch.ones(N, 2)), torch.randn(2, N, WIDTH, requires_grad=True)
    expected = results(masked(model), x)
    sc.replace_attention(model, mask=masks.Window(2, 2))
    assert_same(results(model, x), expected)


class Doubled(Function):
    @staticmethod
    def forward(ctx, x):
        return x * 2

    @staticmethod
    def backward(ctx, grad):
        return grad * 2


def test_gradients_through_code_of_autograd_are_refused():
    model, x = Block(Doubled.apply), torch.randn(2, N, WIDTH)
    expected = masked(model)(x)[1]
    sc.replace_attention(model, mask=masks.Window(2, 2))
    _, weights = model(x)
    torch.testing.assert_close(weights, expected)
    with pytest.raises(UnsupportedError, match="read the weights with torch's functions"):
        weights.sum().backward()


class Split(Reader):
    def forward(self, x):
        q, k, v = self.qkv(x).unflatten(-1, (3, HEADS, -1)).permute(2, 0, 3, 1, 4)
        weights = (q @ k.mT / 2).softmax(-1)
        return weights.view(2, HEADS, 3, 3, N).flatten(2, 3) @ v, weights


def test_weights_in_another_layout_are_refused():
    block = Block(None)
    block.attn = Split(None)
    sc.replace_attention(block, mask=masks.Window(2, 2))
    with pytest.raises(UnsupportedError, match="in another layout"):
        block(torch.randn(2, N, WIDTH))
