"""Former names of methods keep working."""

import torch
from torch import nn

import saccade as sc
from saccade.statistics import Entropy


def test_ask_is_compute_and_unheard_is_not_recorded():
    layer = nn.TransformerEncoderLayer(16, 2, batch_first=True).eval()
    with sc.record(layer, keep=("statistics", "qk")) as recording:
        layer(torch.randn(1, 5, 16))
    run = recording["self_attn"]
    expected = run.compute(Entropy())[0]
    for results in (run.ask(Entropy()), recording.ask(Entropy())["self_attn"], run.matrix.ask(Entropy())):
        assert torch.equal(results[0], expected)
    assert recording.unheard == recording.not_recorded == ()
