"""State dicts under timm's names give timm's formulas, and come back bit for bit."""

import pytest
import torch
from tests.vision import definitions

from saccade import vision

# Our module, and the output of timm's layer with its parameters, written out in float64.
CASES = {
    "SEModule": (
        lambda: vision.ChannelAttention(8, 2),
        lambda x, state: x * definitions.channel_gate(x, state, with_max=False),
        {"fc1.weight": (4, 8, 1, 1), "fc1.bias": (4,), "fc2.weight": (8, 4, 1, 1), "fc2.bias": (8,)},
    ),
    "ChannelAttn": (
        lambda: vision.ChannelAttention(8, 2, pooling=("average", "max"), projection_bias=False),
        lambda x, state: x * definitions.channel_gate(x, state, with_max=True),
        {"fc1.weight": (4, 8, 1, 1), "fc2.weight": (8, 4, 1, 1)},
    ),
    "EcaModule": (
        lambda: vision.ECA(8),
        lambda x, state: x * definitions.eca_gate(x, state),
        {"conv.weight": (1, 1, 3)},
    ),
    "SpatialAttn": (
        lambda: vision.SpatialAttention(3),
        lambda x, state: x * definitions.spatial_gate(x, state),
        {
            "conv.conv.weight": (1, 2, 3, 3),
            **{f"conv.bn.{name}": (1,) for name in ("weight", "bias", "running_mean", "running_var")},
            "conv.bn.num_batches_tracked": (),
        },
    ),
    "CbamModule": (
        lambda: vision.CBAM(8, 2, 5),
        definitions.cbam,
        {
            "channel.fc1.weight": (4, 8, 1, 1),
            "channel.fc2.weight": (8, 4, 1, 1),
            "spatial.conv.conv.weight": (1, 2, 5, 5),
            **{f"spatial.conv.bn.{name}": (1,) for name in ("weight", "bias", "running_mean", "running_var")},
            "spatial.conv.bn.num_batches_tracked": (),
        },
    ),
    "NonLocalAttn": (
        lambda: vision.NonLocal(8, bottleneck=3, scale=8**-0.5),
        lambda x, state: definitions.non_local(x, state, kind="embedded", scale=8**-0.5),
        {
            **{f"{name}.weight": (3, 8, 1, 1) for name in "tpg"},
            **{f"{name}.bias": (3,) for name in "tpg"},
            "z.weight": (8, 3, 1, 1),
            "z.bias": (8,),
            **{f"norm.{name}": (8,) for name in ("weight", "bias", "running_mean", "running_var")},
            "norm.num_batches_tracked": (),
        },
    ),
}


@pytest.mark.parametrize("name", CASES)
def test_there_and_back(name: str, drawn) -> None:
    make, definition, shapes = CASES[name]
    module, x = drawn(make()), torch.randn(2, 8, 5, 7)
    state = vision.to_timm(module)
    assert {key: tuple(own.shape) for key, own in state.items()} == shapes
    expected = definition(x.double(), {key: own.double() for key, own in state.items()})
    torch.testing.assert_close(module(x), expected.float(), rtol=1e-5, atol=1e-5)
    fresh = make().eval()
    fresh.load_state_dict(vision.from_timm(fresh, state))
    assert torch.equal(fresh(x), module(x))
