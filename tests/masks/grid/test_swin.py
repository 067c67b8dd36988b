"""Shifted windows and a table of displacements are Swin's attention."""

import pytest
import torch
from transformers.models.swin.modeling_swin import SwinConfig, SwinLayer

import saccade as sc
from saccade import masks, positions

HEIGHT, WIDTH, WINDOW, HEADS, DIM = 16, 24, 8, 3, 24


def _table(layer: SwinLayer) -> positions.GridTable:
    """The layer's numbers for displacements within a window, in a table for the whole grid."""
    bias = positions.GridTable(HEADS, HEIGHT, WIDTH)
    (numbers,) = layer.attention.relative_position_bias.parameters()
    down = torch.arange(1 - WINDOW, WINDOW)
    distances = down[:, None] * (2 * WIDTH - 1) + down
    with torch.no_grad():
        bias.weight[distances.flatten() + bias.reach] = numbers
    return bias


@pytest.mark.parametrize("shift", [0, 3, 4])
def test_a_layer_of_swin(shift: int) -> None:
    torch.manual_seed(0)
    config = SwinConfig(window_size=WINDOW, hidden_dropout_prob=0.0, attn_implementation="eager")
    layer = SwinLayer(config, DIM, (HEIGHT, WIDTH), HEADS, shift_size=shift).eval()
    for parameter in layer.parameters():
        torch.nn.init.normal_(parameter, std=0.3)
    x = torch.randn(2, HEIGHT * WIDTH, DIM)
    own, normed = layer.attention, layer.layernorm_before(x)
    query, key, value = (
        project(normed).unflatten(2, (HEADS, -1)).transpose(1, 2) for project in (own.q_proj, own.k_proj, own.v_proj)
    )
    mask = masks.ShiftedWindows(HEIGHT, WIDTH, WINDOW, shift)
    merged = sc.attention(query, key, value, mask, bias=_table(layer)).transpose(1, 2).flatten(2)
    after = x + own.o_proj(merged)
    expected = layer(x, (HEIGHT, WIDTH))[0]
    torch.testing.assert_close(after + layer.mlp(layer.layernorm_after(after)), expected, atol=1e-4, rtol=1e-4)
