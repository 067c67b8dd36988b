"""Temperatures of queries: the formula of two models of transformers, in layers, packed, nested and with caches."""

import pytest
import torch
from transformers.models.ministral3.modeling_ministral3 import get_llama_4_attn_scale

from saccade import masks
from saccade.models import Decoder, DecoderConfig, LayerPattern
from saccade.nn import MultiHeadAttention, QKNorm
from saccade.positions import QueryTemperature, Rotary

WARM = QueryTemperature(3, 0.7)


def test_it_is_the_formula_of_transformers():
    places = torch.randint(0, 50, (2, 9))
    expected = get_llama_4_attn_scale(places, 0.3, 7)[:, 0, :, 0]
    torch.testing.assert_close(QueryTemperature(7, 0.3).factors(places), expected)
    of_llama4 = torch.log1p(torch.floor((places.float() + 1.0) / 7)) * 0.3 + 1.0
    torch.testing.assert_close(QueryTemperature(7, 0.3, first=1).factors(places), of_llama4)
    assert QueryTemperature(2, 1.0).factors([[-1, 0, 5]])[0, 0] == 1.0
    assert QueryTemperature(2, 1.0).factors(range(3), dtype=torch.float64).dtype == torch.float64


def _mha(**options):
    torch.manual_seed(0)
    options = {"mask": masks.Causal(), "temperature": WARM, "rotary": Rotary(4)} | options
    mha = MultiHeadAttention(16, 4, num_kv_heads=2, **options).double()
    for parameter in mha.parameters():
        torch.nn.init.normal_(parameter, std=0.5)
    return mha


@pytest.mark.parametrize("options", [{}, {"rotary": None}, {"qk_norm": QKNorm()}, {"short_convolution": 3}], ids=str)
def test_scores_are_multiplied_by_the_factor_of_the_query(options):
    mha, x = _mha(**options), torch.randn(2, 8, 16, dtype=torch.float64)
    plain = _mha(**options, temperature=None)
    plain.load_state_dict(mha.state_dict())
    logs = plain.matrix(x).to_dense().log()
    factors = WARM.factors(range(8), dtype=torch.float64)[:, :, None]
    expected = (logs * factors).masked_fill(~logs.isfinite(), -torch.inf).softmax(-1)
    torch.testing.assert_close(mha.matrix(x).to_dense(), expected)


@pytest.mark.parametrize("options", [{}, {"rotary": None}, {"short_convolution": 3}], ids=str)
def test_packed_nested_and_split_are_alone(options):
    mha, items = _mha(**options), [torch.randn(1, length, 16, dtype=torch.float64) for length in (7, 4)]
    alone = torch.cat([mha(item) for item in items], 1)
    torch.testing.assert_close(mha(torch.cat(items, 1), mask=masks.Documents([7, 4])), alone)
    nested = mha(torch.nested.nested_tensor([item[0] for item in items], layout=torch.jagged))
    torch.testing.assert_close(torch.cat(list(nested.unbind()))[None], alone)
    cache = mha.new_cache()
    parts = [mha(part, cache=cache) for part in items[0].split([3, 1, 1, 2], 1)]
    torch.testing.assert_close(torch.cat(parts, 1), alone[:, :7])


def test_drafts_of_a_tree_are_as_warm_as_alone():
    mha, x, tree = _mha(), torch.randn(1, 7, 16, dtype=torch.float64), masks.Tree([-1, 0, 0, 2])
    turns = [*range(3), *(3 + tree.depths[0]).tolist()]
    out = mha(x, mask=masks.Prefix(3) | tree.after(3), rotary_positions=turns)
    torch.testing.assert_close(out[:, [3, 5, 6]], mha(x[:, [0, 1, 2, 3, 5, 6]])[:, 3:])


def test_layers_of_a_decoder_have_their_own(tmp_path):
    layers = (LayerPattern(), LayerPattern(rotary=False, temperature=WARM))
    config = DecoderConfig(
        vocab_size=20, max_len=30, embed_dim=16, num_heads=2, num_layers=4, feed_forward_dim=8, layers=layers
    )
    model, tokens = Decoder(config).eval(), torch.randint(20, (2, 11))
    assert [layer.attention.temperature for layer in model.stack.layers] == [None, WARM, None, WARM]
    cache = model.new_cache()
    logits = torch.cat([model(part, cache=cache) for part in tokens.split([6, 1, 4], 1)], 1)
    torch.testing.assert_close(logits, model(tokens))
    model.save_pretrained(tmp_path)
    again = Decoder.from_pretrained(tmp_path)
    assert again.config == config
    assert torch.equal(again(tokens), model(tokens))


@pytest.mark.parametrize(
    "arguments, rule",
    [
        ((0, 1.0), "interval must be an int of at least 1"),
        ((3, 0.0), "strength must be a finite number above 0"),
        ((3, 1.0, 2), "first must be below 2"),
    ],
)
def test_wrong_options_are_refused(arguments, rule):
    with pytest.raises(ValueError, match=rule):
        QueryTemperature(*arguments)
    with pytest.raises(TypeError, match="temperature must be a saccade QueryTemperature or None"):
        MultiHeadAttention(8, 2, temperature=1.0)
