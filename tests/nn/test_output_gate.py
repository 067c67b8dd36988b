"""The output gate: scales what heads found, is part of no matrix, goes with every cache."""

import pytest
import torch

from saccade import masks
from saccade.caches import CrossCache, KVCache
from saccade.nn import MultiHeadAttention, to_torch


def test_the_gate_scales_heads_before_the_output_projection() -> None:
    torch.manual_seed(0)
    gated = MultiHeadAttention(16, 4, mask=masks.Causal(), output_gate=True).double().eval()
    plain = MultiHeadAttention(16, 4, mask=masks.Causal()).double().eval()
    left = plain.load_state_dict(gated.state_dict(), strict=False)
    assert left.unexpected_keys == ["gate_projection.weight", "gate_projection.bias"]
    x = torch.randn(2, 7, 16, dtype=torch.float64)
    torch.testing.assert_close(gated.matrix(x).to_dense(), plain.matrix(x).to_dense())
    seen: list[torch.Tensor] = []
    plain.output_projection.register_forward_pre_hook(lambda _, given: seen.append(given[0]))
    plain(x)
    gate = 1 / (1 + (-(x @ gated.gate_projection.weight.T + gated.gate_projection.bias)).exp())
    expected = gated.output_projection(seen[0] * gate)
    torch.testing.assert_close(gated(x), expected)
    out, weights = gated.with_weights(x)
    torch.testing.assert_close(out, expected)
    torch.testing.assert_close(weights.sum(-1), torch.ones(2, 4, 7, dtype=torch.float64))
    cache = KVCache()
    split = torch.cat([gated(x[:, :4], cache=cache), gated(x[:, 4:], cache=cache)], 1)
    torch.testing.assert_close(split, expected)


def test_the_gate_reads_queries_where_a_context_is_looked_at() -> None:
    layer, x = MultiHeadAttention(16, 4, context_dim=8, output_gate=True), torch.randn(1, 5, 16)
    context, cache = torch.randn(1, 3, 8), CrossCache()
    full = layer(x, context)
    split = torch.cat([layer(x[:, :2], context, cache=cache), layer(x[:, 2:], cache=cache)], 1)
    torch.testing.assert_close(split, full)
    layer.gate_projection.weight.data.zero_()
    layer.gate_projection.bias.data.fill_(-torch.inf)
    torch.testing.assert_close(layer(x, context), layer.output_projection.bias.expand(1, 5, 16))


def test_a_gate_has_no_counterpart_in_torch() -> None:
    with pytest.raises(NotImplementedError, match="it has an output_gate; torch's module has none"):
        to_torch(MultiHeadAttention(8, 2, output_gate=True))
    assert MultiHeadAttention(8, 2).gate_projection is None
    with pytest.raises(TypeError, match=r"MultiHeadAttention: output_gate must be True or False; got 'yes'"):
        MultiHeadAttention(8, 2, output_gate="yes")
