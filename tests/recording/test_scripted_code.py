"""Attention in TorchScript calls no function of torch in Python: it is reported, and it cannot be replaced."""

import warnings

import pytest
import torch
from torch import Tensor, nn

import saccade as sc
from saccade.support.errors import UnsupportedError


def script(x):
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)
        return torch.jit.script(x)


@script
def masked_softmax(scores: Tensor, hidden: Tensor) -> Tensor:
    return torch.softmax(scores.masked_fill(hidden, -1e9), dim=-1)


@script
def attended(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return torch.softmax(q @ k.transpose(-2, -1), dim=-1) @ v


@script
def gelu(x: Tensor) -> Tensor:
    return x * torch.sigmoid(1.702 * x)


class Plain(nn.Module):
    def forward(self, x):
        return gelu((x @ x.mT).softmax(-1) @ x)


class WithScriptedSoftmax(nn.Module):
    def forward(self, x):
        return masked_softmax(x @ x.mT, torch.zeros(1, dtype=torch.bool)) @ x


class WithScriptedAttention(nn.Module):
    def forward(self, x):
        return self.attend(x)

    def attend(self, x):
        return attended(x, x, x)


class ToScript(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return torch.softmax(torch.matmul(x, x.transpose(-2, -1)), dim=-1).matmul(x)


KINDS = {
    "WithScriptedSoftmax": WithScriptedSoftmax,
    "WithScriptedAttention": WithScriptedAttention,
    "ToScript": lambda: script(ToScript()),
}


@pytest.fixture
def x():
    return torch.randn(2, 5, 8)


@pytest.mark.parametrize("kind", KINDS)
def test_it_is_reported(kind, x):
    model = nn.Sequential(Plain(), KINDS[kind]())
    expected = model(x)
    with pytest.warns(sc.recording.UnrecordedLayersWarning), sc.record(model) as recording:
        out = model(x)
    assert torch.equal(out, expected)
    assert recording.layers == ("0",)
    assert recording.not_recorded == ("1",)
    assert f"1: ran but was not recorded ({kind})" in repr(recording)


@pytest.mark.parametrize("kind", KINDS)
def test_it_is_refused(kind, x):
    model = nn.Sequential(Plain(), KINDS[kind]())
    expected = model(x)
    with pytest.raises(UnsupportedError, match=r"1 is \w+: it (calls the scripted function|is a traced program)"):
        sc.replace_attention(model)
    assert torch.equal(model(x), expected)


def test_the_other_layers_are_replaced(x):
    model = nn.Sequential(Plain(), WithScriptedSoftmax())
    expected = model(x)
    sc.replace_attention(model, leave=["1"])
    torch.testing.assert_close(model(x), expected)


def test_other_programs_and_functions_are_no_attention(x):
    model = nn.Sequential(Plain(), script(nn.Linear(8, 8)))
    expected = model(x)
    with sc.record(model) as recording:
        model(x)
    assert not recording.not_recorded
    with sc.intervene(model) as edit:
        edit.scale("0", None, 0.0)
        model(x)
    sc.replace_attention(model)
    torch.testing.assert_close(model(x), expected)
