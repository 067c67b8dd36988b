"""Layers that replace_attention cannot replace are named in the error, and the model is unchanged."""

import re

import pytest
import torch
from tests.integrations.replaceable_models import D, H, One, gpt2
from torch import nn

import saccade as sc
from saccade import mechanisms
from saccade.support.errors import UnsupportedError

REFUSED = {
    "none": (lambda: nn.Linear(3, 3), {}, "it contains no supported attention module"),
    "ours": (lambda: nn.Sequential(sc.nn.MultiHeadAttention(D, H)), {}, "it already runs on saccade"),
    "a mechanism": (gpt2, {"mechanism": mechanisms.Linear()}, "which runs exact softmax"),
    "a class": (One, {"mechanism": mechanisms.Linear}, "mechanism must be a saccade Mechanism or None; got the class"),
    "a tensor": (
        One,
        {"mask": torch.ones(3, 3)},
        "mask must be a saccade mask, a mapping from names to masks, or None",
    ),
    "a mapping to a tensor": (
        One,
        {"mask": {"inner": torch.ones(3, 3)}},
        "mask must map names of modules to saccade masks",
    ),
    "a mapping from a number": (One, {"mask": {0: None}}, "mask must map names of modules to saccade masks"),
    "a name of none": (One, {"mask": {"iner": None}}, "mask must contain names of modules of the model; got 'iner'"),
    "a mapping and names": (
        One,
        {"mask": {"inner": None}, "cross_attention": []},
        "cross_attention must be None if mask is",
    ),
    "no module": (lambda: [1], {}, "model must be a module; got list"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_unsupported_modules_are_named_and_nothing_changes(name):
    build, options, words = REFUSED[name]
    model = build()
    before = str(model)
    with pytest.raises((UnsupportedError, TypeError, ValueError), match=re.escape(words)):
        sc.replace_attention(model, **options)
    assert str(model) == before


def test_twice_says_that_it_has_been_done():
    model = One()
    sc.replace_attention(model)
    with pytest.raises(UnsupportedError, match="it already runs on saccade"):
        sc.replace_attention(model)
