"""Rotary positions with several axes, and positions for the rotation alone."""

import pytest
import torch
from transformers import Qwen2VLTextConfig, Qwen3VLTextConfig
from transformers.models.qwen2_vl import modeling_qwen2_vl
from transformers.models.qwen3_vl import modeling_qwen3_vl

from saccade import masks
from saccade.caches import KVCache, SinkWindowCache
from saccade.models import Decoder, DecoderConfig, LayerPattern
from saccade.nn import EncoderLayer, EncoderStack, FeedForward, LatentAttention, MultiHeadAttention
from saccade.positions import Rotary

SIZES = {"hidden_size": 64, "num_attention_heads": 4, "num_key_value_heads": 2}
PEERS = {
    "sections": (Qwen2VLTextConfig, modeling_qwen2_vl, "Qwen2VLRotaryEmbedding", (2, 3, 3), 16),
    "in turn": (Qwen3VLTextConfig, modeling_qwen3_vl, "Qwen3VLTextRotaryEmbedding", (8, 4, 4), 32),
    "in turn, with pairs left over": (
        Qwen3VLTextConfig,
        modeling_qwen3_vl,
        "Qwen3VLTextRotaryEmbedding",
        (10, 3, 3),
        32,
    ),
}


@pytest.mark.parametrize("name", PEERS)
def test_it_turns_as_transformers_does(name):
    config, peer, embedding, sections, width = PEERS[name]
    rope = {"rope_type": "default", "rope_theta": 100.0, "mrope_section": list(sections)}
    theirs = getattr(peer, embedding)(config(**SIZES, head_dim=width, rope_parameters=rope))
    query, places = torch.randn(2, 4, 9, width), torch.randint(0, 40, (3, 2, 9))
    expected, _ = peer.apply_rotary_pos_emb(query, query, *theirs(query, places))
    rotary = Rotary(width, base=100.0, sections=sections, interleaved_sections=name.startswith("in turn"))
    axes_first = places.transpose(0, 1)
    torch.testing.assert_close(rotary(query, axes_first), expected)
    torch.testing.assert_close(rotary.unrotate(expected, axes_first), query)


@pytest.mark.parametrize("layout", ["half", "interleaved"])
@pytest.mark.parametrize("in_turn", [False, True])
def test_text_turns_as_without_sections(layout, in_turn):
    plain = Rotary(12, layout=layout)
    rotary = Rotary(12, layout=layout, sections=(2, 2, 2), interleaved_sections=in_turn)
    x, places = torch.randn(2, 3, 7, 12), torch.randint(0, 99, (2, 7))
    for given in (range(4, 11), places[0], places):
        assert torch.equal(rotary(x, given), plain(x, given))
    assert torch.equal(rotary(x, places[:, None].expand(-1, 3, -1)), plain(x, places))
    assert torch.equal(rotary.tables(places[:, None].expand(-1, 3, -1)).cos, plain.tables(places).cos)


def test_products_depend_on_distances_along_each_axis():
    rotary = Rotary(12, sections=(1, 2, 3))
    query, key = (torch.randn(1, 1, 5, 12, dtype=torch.float64) for _ in range(2))
    places, shift = torch.randint(0, 9, (1, 3, 5)), torch.tensor([4, 0, 30])[None, :, None]
    scores = rotary(query, places) @ rotary(key, places).mT
    torch.testing.assert_close(rotary(query, places + shift) @ rotary(key, places + shift).mT, scores)


@pytest.mark.parametrize(
    "options, rule",
    [
        ({"sections": (2, 2)}, "sections must sum to 6, half of rotary_dim"),
        ({"sections": ()}, "sections must sum to 6"),
        ({"sections": (2, -1, 5)}, "sections must be an int of at least 0"),
        ({"sections": (1, 2, 3), "interleaved_sections": True}, "allow the pairs to cycle through the axes"),
        ({"interleaved_sections": 1}, "interleaved_sections must be True or False"),
    ],
)
def test_wrong_sections_are_refused(options, rule):
    with pytest.raises((ValueError, TypeError), match=rule):
        Rotary(12, **options)


def test_wrong_shapes_are_refused():
    x = torch.randn(2, 3, 7, 12)
    with pytest.raises(ValueError, match=r"or \[2, 3, 7\] with an axis for each section; got \[2, 2, 7\]"):
        Rotary(12, sections=(2, 2, 2))(x, torch.zeros(2, 2, 7, dtype=torch.int64))
    with pytest.raises(ValueError, match=r"positions must have shape \[7\] or \[2, 7\]; got \[2, 3, 7\]"):
        Rotary(12)(x, torch.zeros(2, 3, 7, dtype=torch.int64))


def _decoder():
    torch.manual_seed(0)
    layers = (LayerPattern(), LayerPattern(rotary=False), LayerPattern(rotary_base=50.0))
    config = DecoderConfig(
        vocab_size=50, max_len=64, embed_dim=24, num_heads=2, num_layers=3, feed_forward_dim=32, layers=layers
    )
    model = Decoder(config).double().eval()
    for parameter in model.parameters():
        torch.nn.init.normal_(parameter, std=0.3)
    return model


PARENTS = (-1, 0, 0, 1, 1, 2, 5)


def _path(token):
    return [] if token < 0 else [*_path(PARENTS[token]), token]


@pytest.mark.parametrize("with_cache", [False, True])
def test_every_draft_of_a_tree_is_that_draft_alone(with_cache):
    model, context = _decoder(), torch.randint(50, (1, 5))
    drafts, tree = torch.randint(50, (1, 7)), masks.Tree(PARENTS)
    mask = masks.Prefix(5) | tree.after(5)
    turns = torch.cat([torch.arange(5)[None], 5 + tree.depths], 1)
    if with_cache:
        cache = model.new_cache()
        model(context, cache=cache)
        together = model(drafts, mask=mask, rotary_positions=turns[:, 5:], cache=cache)
    else:
        together = model(torch.cat([context, drafts], 1), mask=mask, rotary_positions=turns)[:, 5:]
    for token in range(7):
        path = _path(token)
        alone = model(torch.cat([context, drafts[:, path]], 1))
        torch.testing.assert_close(together[:, token], alone[:, -1])


def test_continuations_of_a_prompt_are_each_alone():
    model, prompt = _decoder(), torch.randint(50, (1, 4))
    parts = torch.randint(50, (1, 6)).split([2, 4], 1)
    turns = [*range(4), *range(4, 6), *range(4, 8)]
    together = model(torch.cat([prompt, *parts], 1), mask=masks.shared_prefix([4, 2, 4]), rotary_positions=turns)
    for part, own in zip(parts, together[:, 4:].split([2, 4], 1), strict=True):
        torch.testing.assert_close(own, model(torch.cat([prompt, part], 1))[:, 4:])


def test_noisy_blocks_are_those_after_clean_text():
    torch.manual_seed(0)
    stack = EncoderStack(
        [EncoderLayer(MultiHeadAttention(12, 2, rotary=Rotary(6)), FeedForward(12, 16)) for _ in range(2)]
    ).double()
    noisy, clean = torch.randn(2, 1, 6, 12, dtype=torch.float64)
    mask, turns = masks.BlockDiffusion(2, 6), [*range(6), *range(6)]
    together = stack(torch.cat([noisy, clean], 1), mask=mask, rotary_positions=turns)
    matrices = stack.matrices(torch.cat([noisy, clean], 1), mask=mask, rotary_positions=turns)
    assert all(torch.equal(matrix.to_dense()[0, 0] > 0, mask.to_dense(12)[0, 0]) for matrix in matrices)
    for block in range(3):
        start, stop = 2 * block, 2 * block + 2
        tokens = torch.cat([clean[:, :start], noisy[:, start:stop]], 1)
        alone = stack(tokens, mask=masks.Coarse(masks.Causal(), 2))
        torch.testing.assert_close(together[:, start:stop], alone[:, start:])


def test_positions_that_nothing_would_use_are_refused():
    x = torch.randn(1, 3, 24, dtype=torch.float64)
    mha = MultiHeadAttention(24, 2, mask=masks.Causal()).double()
    turning = MultiHeadAttention(24, 2, rotary=Rotary(12), mask=masks.Causal()).double()
    with pytest.raises(ValueError, match="rotary_positions must be None in a layer without rotary"):
        mha(x, rotary_positions=range(3))
    with pytest.raises(ValueError, match="rotary_positions must be None in cross-attention"):
        turning(x, x + 1, rotary_positions=range(3))
    with pytest.raises(ValueError, match="rotary_positions must be None with a SinkWindowCache that rotates keys"):
        turning(x, rotary_positions=range(3), cache=SinkWindowCache(1, 4, rotary=Rotary(12)))
    with pytest.raises(ValueError, match="rotary_positions must be None in a stack without rotary"):
        EncoderStack([EncoderLayer(mha, FeedForward(24, 8).double())])(x, rotary_positions=range(3))
    with pytest.raises(ValueError, match=r"positions must have shape \[3\] or \[1, 3\]; got \[4\]"):
        turning(x, rotary_positions=range(4))
    with pytest.raises(TypeError, match="rotary_positions"):
        LatentAttention(24, 2, latent_dim=4, head_dim=4, rotary_dim=0)(x.float(), rotary_positions=range(3))
    out = turning(x, rotary_positions=[0, 5, 5], cache=KVCache())
    torch.testing.assert_close(out, turning(x, rotary_positions=torch.tensor([0, 5, 5])))
