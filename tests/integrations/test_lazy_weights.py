"""Weights that a replaced layer returns by default cost nothing until they are read, and are then torch's."""

import copy
import io
import pickle

import numpy as np
import pytest
import torch
from tests.integrations.replaceable_models import D, H, One
from torch import nn

import saccade as sc
from saccade import masks, mechanisms
from saccade.integrations import lazy_weights
from saccade.integrations.lazy_weights import LazyWeights
from saccade.support.errors import UnsupportedError

B, L = 2, 7


@pytest.fixture(autouse=True)
def few(monkeypatch):
    """Every matrix is a large one."""
    monkeypatch.setattr(lazy_weights, "DENSE_LIMIT", 10)


def models(**options):
    torch.manual_seed(0)
    theirs = One(batch_first=True)
    ours = copy.deepcopy(theirs)
    sc.replace_attention(ours, **options)
    return ours, theirs


def inputs():
    return torch.randn(B, L, D, dtype=torch.float64, generator=torch.Generator().manual_seed(1)).requires_grad_()


def is_computed(weights):
    return weights._content._weights is not None


@pytest.mark.parametrize("average", [True, False])
@pytest.mark.parametrize("is_single", [True, False])
def test_they_are_torchs_with_their_gradient(average, is_single):
    ours, theirs = models()
    x = inputs()
    x = x[0].detach().requires_grad_() if is_single else x
    hidden = torch.ones(L, L, dtype=torch.bool).triu(1)
    _, weights = ours(x, x, x, attn_mask=hidden, average_attn_weights=average)
    _, expected = theirs(x, x, x, attn_mask=hidden, average_attn_weights=average)
    assert isinstance(weights, LazyWeights)
    about = [(w.shape, w.dtype, w.device, w.dim(), w.size(0), len(w), w.numel()) for w in (weights, expected)]
    assert about[0] == about[1]
    assert weights.requires_grad
    assert repr(weights).startswith("LazyWeights(shape=")
    assert not is_computed(weights)
    torch.testing.assert_close(weights + 0, expected)
    assert type(weights + 0) is torch.Tensor
    (grad,), (their,) = (torch.autograd.grad(w.sin().sum(), x) for w in (weights, expected))
    torch.testing.assert_close(grad, their)


READ = {
    "sum": lambda w: w.sum(),
    "an index": lambda w: w[0, 1],
    "in a list": lambda w: torch.cat([w, w]),
    "numpy": lambda w: torch.from_numpy(np.asarray(w.detach())),
    "a list of numbers": lambda w: torch.tensor(w.tolist()),
    "in place": lambda w: w.detach().clone().mul_(2),
    "saved": lambda w: saved(w.detach()),
    "pickled": lambda w: pickle.loads(pickle.dumps(w.detach())),
    "copied": lambda w: copy.deepcopy(w.detach()),
    "a loss": lambda w: nn.functional.mse_loss(w, torch.zeros_like(w)),
    "iterated": lambda w: torch.stack(list(w)),
    "C++": torch.ops.aten.clone.default,
}


def saved(x):
    file = io.BytesIO()
    torch.save(x, file)
    file.seek(0)
    return torch.load(file)


@pytest.mark.parametrize("read", READ)
def test_whatever_reads_them_gets_ordinary_tensors(read):
    ours, theirs = models()
    x = inputs().detach()
    with torch.no_grad():
        got, expected = READ[read](ours(x, x, x)[1]), READ[read](theirs(x, x, x)[1])
    assert type(got) is torch.Tensor
    torch.testing.assert_close(got, expected)


def test_a_layer_that_throws_them_away_never_computes_them(monkeypatch):
    ours, theirs = models()
    x, seen = inputs(), []
    monkeypatch.setattr(lazy_weights, "_averaged", lambda matrix: seen.append(1))
    out, weights = ours(x, x, x)
    detached = weights.detach()
    torch.testing.assert_close(out, theirs(x, x, x)[0])
    out.sum().backward()
    assert isinstance(detached, LazyWeights)
    assert not seen


def test_gradients_are_those_of_the_call_not_of_the_reader():
    ours, _ = models()
    x = inputs()
    with torch.no_grad():
        _, without = ours(x, x, x)
    _, with_grad = ours(x, x, x)
    assert not without.requires_grad
    assert not (without + 1).requires_grad
    with torch.no_grad():
        assert not (with_grad + 1).requires_grad
    assert (with_grad + 1).requires_grad  # read a second time


CHANGES = {
    "a parameter": ({"mechanism": mechanisms.Softmax(sink_logit=H)}, lambda model: model.inner.mechanism.sink_logit),
    "a mask": ({"mask": masks.Dense(torch.ones(L, L, dtype=torch.bool))}, lambda model: model.inner.mask.allowed),
}


@pytest.mark.parametrize("name", CHANGES)
def test_weights_are_refused_after_inputs_changed(name):
    options, changed = CHANGES[name]
    ours, _ = models(**options)
    x = inputs()
    _, weights = ours(x, x, x)
    with torch.no_grad():
        changed(ours).zero_()
    with pytest.raises(UnsupportedError, match="was changed in place after the call"):
        weights.sum()


def test_a_mask_of_the_call_may_be_used_again():
    ours, theirs = models()
    x, hidden = inputs(), torch.ones(L, L, dtype=torch.bool).triu(1)
    expected = theirs(x, x, x, attn_mask=hidden.clone())[1]
    _, weights = ours(x, x, x, attn_mask=hidden)
    hidden.zero_()
    torch.testing.assert_close(weights + 0, expected)


def test_too_many_are_refused_when_they_are_read(monkeypatch):
    monkeypatch.setattr(lazy_weights, "_LIMIT", 50)
    ours, _ = models()
    x = inputs()
    out, weights = ours(x, x, x)
    assert out.shape == x.shape
    with pytest.raises(UnsupportedError, match=r"these are 98 weights, \[2, 7, 7\]"):
        weights.sum()


@pytest.mark.parametrize("use_reentrant", [True, False])
def test_checkpoints_pass_them_on(use_reentrant):
    ours, theirs = models()
    x, y = inputs(), inputs()
    again = torch.utils.checkpoint.checkpoint(lambda x: ours(x, x, x), x, use_reentrant=use_reentrant)
    again[0].sum().backward()
    theirs(y, y, y)[0].sum().backward()
    torch.testing.assert_close(x.grad, y.grad)


def test_a_long_input_runs_where_weights_are_the_default(monkeypatch):
    monkeypatch.undo()
    block = nn.ModuleDict({"attn": nn.MultiheadAttention(32, 4, batch_first=True)})
    sc.replace_attention(block, mask=masks.Window(64, 64))
    x = torch.randn(1, 8192, 32)
    with torch.no_grad():
        out, weights = block["attn"](x, x, x)
    assert out.shape == x.shape
    assert weights.shape == (1, 8192, 8192)
