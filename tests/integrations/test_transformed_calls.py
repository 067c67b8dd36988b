"""Replaced and edited models under torch's transforms, which refuse rather than run without masks and edits."""

import pytest
import torch
from tests.integrations.own_code_attention import STYLES, D, Model
from torch.fx.experimental.proxy_tensor import make_fx

import saccade as sc
from saccade import masks

TRANSFORMS = {
    "vmap": lambda model, x: torch.vmap(model)(x[:, None]),
    "grad": lambda model, x: torch.func.grad(lambda x: model(x).sum())(x),
    "jvp": lambda model, x: torch.func.jvp(model, (x,), (torch.ones_like(x),)),
    "trace": lambda model, x: torch.jit.trace(model, (x,), check_trace=False),
    "make_fx": lambda model, x: make_fx(model)(x),
}


def model_of(style):
    torch.manual_seed(0)
    return Model(STYLES[style]).double().eval()


@pytest.mark.filterwarnings("ignore::torch.jit.TracerWarning", "ignore::DeprecationWarning")
@pytest.mark.parametrize("transform", TRANSFORMS)
@pytest.mark.parametrize("style", ["written", "sdpa"])
def test_masks_and_edits_are_never_left_out(style, transform):
    x = torch.randn(2, 9, D, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
    model = model_of(style)
    with sc.intervene(model) as edit:
        edit.ablate("blocks.0.attn", 0)
        with pytest.raises(sc.UnsupportedError, match="transforms or traces"):
            TRANSFORMS[transform](model, x)
    sc.replace_attention(model, mask=masks.Window(2, 0))
    with pytest.raises(sc.UnsupportedError, match="transforms or traces"):
        TRANSFORMS[transform](model, x)


def test_partial_lists_calls_that_a_transform_left_alone():
    x = torch.randn(2, 9, D, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
    model = model_of("sdpa")
    expected = torch.func.grad(lambda x: model(x).sum())(x)
    replaced = sc.replace_attention(model, partial=True)
    torch.testing.assert_close(torch.func.grad(lambda x: model(x).sum())(x), expected)
    assert all(one.how.startswith("left alone: ") and "transforms" in one.how for one in replaced)
