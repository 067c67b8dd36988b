"""What replace_attention cannot replace is named, and nothing changes."""

import re

import pytest
import torch
from tests.integrations.replaceable_models import D, H, One, TimmForm, gpt2
from torch import nn

import saccade as sc
from saccade import mechanisms
from saccade.support.errors import UnsupportedError


class OwnForward(nn.MultiheadAttention):
    def forward(self, *args, **kwargs):
        return super().forward(*args, **kwargs)


class RopeForm(TimmForm):
    """The form of timm's AttentionRope."""

    def forward(self, x, rope=None, attn_mask=None):
        return super().forward(x if rope is None else x * rope, attn_mask)


def parametrized():
    model = One()
    nn.utils.parametrize.register_parametrization(model.inner, "in_proj_weight", nn.Identity())
    return model


class StrangeAttention(nn.Module):
    def __init__(self):
        super().__init__()
        self.weight = nn.Linear(D, D)


REFUSED = {
    "a forward of its own": (lambda: nn.Sequential(OwnForward(D, H)), {}, "0 is OwnForward: its forward is not that"),
    "rotary": (lambda: nn.Sequential(TimmForm(), RopeForm()), {}, "1 is RopeForm: its forward takes rope too"),
    "parametrized": (parametrized, {}, "its weights are computed from others, by parametrizations"),
    "something else": (lambda: nn.Sequential(TimmForm(wrong=True)), {}, "0 is TimmForm: it computes something else"),
    "unknown": (lambda: nn.Sequential(One(), StrangeAttention()), {}, "1 is StrangeAttention: how it computes is not"),
    "none": (lambda: nn.Linear(3, 3), {}, "no part of it is an attention that is known here"),
    "itself": (lambda: nn.MultiheadAttention(D, H), {}, "it is itself the attention"),
    "ours": (lambda: nn.Sequential(sc.nn.MultiHeadAttention(D, H)), {}, "it runs on saccade already"),
    "a mechanism": (gpt2, {"mechanism": mechanisms.Linear()}, "which runs exact softmax"),
    "a class": (One, {"mechanism": mechanisms.Linear}, "mechanism must be a saccade Mechanism or None; got the class"),
    "a tensor": (One, {"mask": torch.ones(3, 3)}, "mask must be a saccade mask or None; got Tensor"),
    "no module": (lambda: [1], {}, "model must be a module; got list"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_unsupported_modules_are_named_and_nothing_changes(name):
    build, options, words = REFUSED[name]
    model = build()
    before = str(model)
    with pytest.raises((UnsupportedError, TypeError), match=re.escape(words)):
        sc.replace_attention(model, **options)
    assert str(model) == before


def test_twice_says_that_it_has_been_done():
    model = One()
    sc.replace_attention(model)
    with pytest.raises(UnsupportedError, match="it runs on saccade already"):
        sc.replace_attention(model)
