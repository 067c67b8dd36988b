"""Equal to timm's own layers, in evaluation and in training, with parameters carried both ways."""

import pytest
import torch
from tests.vision.test_convert import CASES

from saccade import vision

# timm imports torchvision, whose wheel must be built for the torch that is installed: a CPU torch from one index and
# a CUDA torchvision from another do not load together. test_convert checks the same formulas in float64.
pytest.importorskip("timm", reason="needs timm, with a torchvision built for this torch")
from timm.layers import cbam, eca, non_local_attn, squeeze_excite

THEIRS = {
    "SEModule": lambda: squeeze_excite.SEModule(8, rd_channels=4),
    "ChannelAttn": lambda: cbam.ChannelAttn(8, rd_channels=4),
    "EcaModule": lambda: eca.EcaModule(8, kernel_size=3),
    "SpatialAttn": lambda: cbam.SpatialAttn(3),
    "CbamModule": lambda: cbam.CbamModule(8, rd_channels=4, spatial_kernel_size=5),
    "NonLocalAttn": lambda: non_local_attn.NonLocalAttn(8, rd_channels=3),
}


@pytest.mark.parametrize("training", [False, True], ids=["eval", "train"])
@pytest.mark.parametrize("name", CASES)
def test_same_outputs_and_parameters_both_ways(name: str, training: bool, drawn) -> None:
    theirs = drawn(THEIRS[name]()).train(training)
    ours = CASES[name][0]().train(training)
    ours.load_state_dict(vision.from_timm(ours, theirs.state_dict()))
    other = THEIRS[name]().train(training)
    other.load_state_dict(vision.to_timm(ours))
    x = torch.randn(2, 8, 5, 7)
    expected = theirs(x)
    torch.testing.assert_close(ours(x), expected, rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(other(x), expected, rtol=0, atol=0)
