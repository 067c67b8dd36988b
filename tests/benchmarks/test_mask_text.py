"""Masks from the command line."""

import pytest
from benchmarks.mask_text import mask_of

from saccade import masks
from saccade.masks import Causal, Coarse, Documents, Global, Window


@pytest.mark.parametrize(
    "text, mask",
    [
        ("Window(256, 256)", Window(256, 256)),
        (" Window(left=3, right=None)", Window(3, None)),
        ("Causal() & (Window(255, 0) | Global([0, 7]))", Causal() & (Window(255, 0) | Global([0, 7]))),
        ("~Window(1, 1)", ~Window(1, 1)),
        ("Coarse(Window(1, 1), 64)", Coarse(Window(1, 1), 64)),
        ("Documents((3, 5), rule=Causal())", Documents([3, 5], rule=Causal())),
        ("longformer(4, [0])", masks.longformer(4, [0])),
    ],
)
def test_a_text_names_a_mask(text, mask):
    assert mask_of(text) == mask


@pytest.mark.parametrize(
    "text, why",
    [
        ("__import__('os').getcwd()", "is none of Mask"),
        ("open('x')", "open is none of"),
        ("Window", "malformed"),
        ("Window.mro()", "is none of"),
        ("Causal().after(1)", "is none of"),
        ("Window(256, 256", "never closed"),
        ("Window(*[1, 2])", "malformed"),
        ("Window(**{'left': 1})", r"\*\* is not read"),
        ("Window(-1, 0)", "at least 0"),
        ("Window(1)", "right"),
        ("Predicate(lambda b, h, q, k: q == k)", "malformed"),
        ("Causal() & 3", "3 is no mask"),
        ("~5", "5 is no mask"),
        ("3", "a mask is written like"),
        ("", "invalid syntax"),
    ],
)
def test_nothing_else_is_read(text, why):
    with pytest.raises(ValueError, match=why):
        mask_of(text)
