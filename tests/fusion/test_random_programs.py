"""Programs of random operations on scores, with views and values that stay in use: results are those without fusion."""

import random

import pytest
import torch
from tests.fusion.agreement import run
from torch.nn import functional as F

from saccade.fusion import ObserveAttention

B, H, N, D = 2, 2, 4, 3
SHAPES = [(B, H, N, N), (B * H, N, N), (B, 1, H, N, N), (H, B, N, N), (B, H, N * N), (B, N, H, N)]


def _causal():
    return torch.ones(N, N).triu(1) > 0


def _index(x):
    x[..., 0] = 0.5
    return x


# Each takes a tensor of any shape with as many elements as there are scores, and returns one.
OPERATIONS = {
    "scale": lambda x, draw: x * draw.choice([0.5, 2, -1.0]),
    "scale in place": lambda x, draw: x.mul_(draw.choice([0.5, 2.0])),
    "divide": lambda x, draw: x / 3,
    "add": lambda x, draw: x + torch.arange(x.shape[-1]) / 7,
    "add number": lambda x, draw: x + 1,
    "add in place": lambda x, draw: x.add_(torch.linspace(-1, 1, x.shape[-1])),
    "subtract": lambda x, draw: x.sub(torch.ones(())),
    "fill": lambda x, draw: x.masked_fill(_causal(), draw.choice([-1e9, -1e4, -150.0, 0.0, 3.0, -float("inf")])),
    "fill in place": lambda x, draw: x.masked_fill_(_causal(), -1e9),
    "where": lambda x, draw: torch.where(_causal(), -1e9, x),
    "tanh": lambda x, draw: x.tanh(),
    "cap": lambda x, draw: 2 * torch.tanh(x / 2),
    "relu": lambda x, draw: F.relu(x),
    "softmax": lambda x, draw: x.softmax(draw.choice([-1, -1, -1, -2, 0])),
    "dropout": lambda x, draw: F.dropout(x, 0.3, training=False),
    "double": lambda x, draw: x.double(),
    "float": lambda x, draw: x.float(),
    "same type": lambda x, draw: x.type_as(torch.zeros(())),
    "view": lambda x, draw: x.reshape(draw.choice(SHAPES)),
    "transpose": lambda x, draw: x.transpose(draw.randrange(x.dim()), draw.randrange(x.dim())),
    "transpose matrices": lambda x, draw: x.mT,
    "unsqueeze": lambda x, draw: x.unsqueeze(draw.randrange(x.dim())) if x.dim() < 6 else x.squeeze(),
    "squeeze": lambda x, draw: x.squeeze(),
    "contiguous": lambda x, draw: x.contiguous(),
    "clone": lambda x, draw: x.clone(),
    "detach": lambda x, draw: x.detach(),
    "write": lambda x, draw: _index(x),
    "like": lambda x, draw: x + torch.ones_like(x),
    "sum of both": lambda x, draw: x + x,
    "flip": lambda x, draw: x.flip(-1),
}
LIKELY = ["scale", "fill", "softmax", "view", "transpose", "add", "softmax"]


def program(seed, q, k, v):
    """Run random operations on random values; return all that are left, and products of them with values."""
    draw = random.Random(seed)
    torch.manual_seed(seed)
    values = [q @ k.mT if draw.random() < 0.7 else torch.einsum("bhid,bhjd->bijh", q, k).permute(0, 3, 1, 2)]
    names = []
    for _ in range(draw.randint(2, 9)):
        at = draw.randrange(len(values))
        names.append(draw.choice(LIKELY if draw.random() < 0.5 else list(OPERATIONS)))
        try:
            out = OPERATIONS[names[-1]](values[at], draw)
        except (RuntimeError, IndexError) as error:  # shapes that do not fit, or a write that torch forbids
            names[-1] += f": {type(error).__name__}"
            continue
        if draw.random() < 0.6:
            values[at] = out
        else:
            values.append(out)
    results = []
    for x in values:
        x = x.softmax(-1) if draw.random() < 0.5 else x  # noqa: PLW2901
        if x.shape == (B, H, N, N) and x.dtype == v.dtype:
            results.append(x @ v)
        elif x.shape == (B * H, N, N) and x.dtype == v.dtype:
            results.append(torch.bmm(x, v.flatten(0, 1)))
        if draw.random() < 0.3 or not results:
            results.append(x.clamp(-50, 50))
    return torch.cat([x.double().flatten() for x in results]), names


def check(seeds):
    fused = 0
    for seed in seeds:
        torch.manual_seed(seed)
        q, k, v = leaves = [torch.randn(B, H, N, D, requires_grad=seed % 3 > 0) for _ in range(3)]
        plain, message = None, ""
        try:
            plain = run(lambda: program(seed, q, k, v)[0], leaves, fused=False)  # noqa: B023
        except RuntimeError as error:
            message = str(error)
        if plain is None:  # torch has no gradient of a value that was written to
            assert "modified by an inplace operation" in message
            continue
        ours = run(lambda: program(seed, q, k, v)[0], leaves, fused=True)  # noqa: B023
        names = program(seed, q.detach(), k.detach(), v.detach())[1]
        assert ours.out.requires_grad == plain.out.requires_grad, (seed, names)
        for x, y in zip((ours.out, *ours.grads), (plain.out, *plain.grads), strict=True):
            torch.testing.assert_close(x, y, equal_nan=True, atol=5e-5, rtol=5e-5, msg=f"{seed}: {names}")
        if not ours.calls:  # gradients may be summed in another order
            torch.testing.assert_close(ours.out, plain.out, equal_nan=True, atol=0.0, rtol=0.0, msg=f"{seed}: {names}")
        fused += len(ours.calls)
    return fused


def test_some():
    assert check(range(120)) > 5


def test_observing_changes_no_bit():
    seen = []
    for seed in range(200):
        torch.manual_seed(seed)
        q, k, v = (torch.randn(B, H, N, D) for _ in range(3))
        expected = program(seed, q, k, v)[0]
        with ObserveAttention(seen.append, on_weights=seen.append):
            out = program(seed, q, k, v)[0]
        torch.testing.assert_close(out, expected, equal_nan=True, atol=0.0, rtol=0.0)
    assert len(seen) > 20


@pytest.mark.slow
def test_twenty_thousand():
    assert check(range(20_000)) > 500
