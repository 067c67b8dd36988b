"""Decoders whose layers read the keys and values of earlier layers: the config, files, caches and costs."""

import dataclasses
from pathlib import Path

import pytest
import torch

import saccade as sc
from saccade import masks
from saccade.models import Decoder, DecoderConfig, LayerPattern, generate
from saccade.nn import QKNorm, SharedKeyAttention

WINDOW, WIDE = LayerPattern(masks.sliding_window(4)), LayerPattern(rotary_base=1e6)
CONFIG = DecoderConfig(
    vocab_size=30,
    max_len=64,
    embed_dim=16,
    num_heads=4,
    num_kv_heads=2,
    num_layers=6,
    feed_forward_dim=24,
    qk_norm=QKNorm(),
    layers=(WINDOW, WINDOW, WIDE),
    kv_layers=(0, 1, 2, 1, 1, 2),
)
TOKENS = torch.randint(0, 30, (2, 17), generator=torch.Generator().manual_seed(0))


def _decoder(config: DecoderConfig = CONFIG) -> Decoder:
    torch.manual_seed(0)
    decoder = Decoder(config)
    with torch.no_grad():
        for parameter in decoder.parameters():
            parameter.add_(0.2 * torch.randn_like(parameter))
    return decoder.eval()


def test_layers_read_the_keys_that_the_config_names() -> None:
    attentions = [layer.attention for layer in _decoder().stack.layers]
    assert [getattr(own, "source", None) for own in attentions] == [None, None, None, 1, 1, 2]
    assert isinstance(attentions[5], SharedKeyAttention)
    assert attentions[5].mask == masks.Causal()
    assert attentions[4].mask == masks.sliding_window(4)


@torch.no_grad()
def test_own_keys_everywhere_are_the_plain_decoder() -> None:
    plain = _decoder(dataclasses.replace(CONFIG, kv_layers=None))
    same = Decoder(dataclasses.replace(CONFIG, kv_layers=tuple(range(6)))).eval()
    same.load_state_dict(plain.state_dict())
    assert torch.equal(same(TOKENS), plain(TOKENS))


@torch.no_grad()
def test_generated_tokens_are_those_without_a_cache() -> None:
    decoder = _decoder()
    prompt = TOKENS[:1, :9]
    tokens = prompt
    for _ in range(8):
        tokens = torch.cat([tokens, decoder(tokens)[:, -1:].argmax(-1)], 1)
    assert generate(decoder, prompt, max_new_tokens=8) == tokens[:, 9:].tolist()


def test_files_hold_the_sharing_and_no_unused_weights(tmp_path: Path) -> None:
    decoder = _decoder()
    decoder.save_pretrained(tmp_path)
    loaded = Decoder.from_pretrained(tmp_path)
    assert loaded.config == CONFIG
    assert loaded.state_dict().keys() == decoder.state_dict().keys()
    assert not any("layers.3.attention.key" in name for name in loaded.state_dict())
    assert torch.equal(loaded(TOKENS), decoder(TOKENS))


def test_costs_count_shared_keys_once() -> None:
    shared, own = (sc.cost(config, 64) for config in (CONFIG, dataclasses.replace(CONFIG, kv_layers=None)))
    assert shared.cache_bytes * 2 == own.cache_bytes
    assert shared.parameter_bytes == own.parameter_bytes - 3 * 4 * (2 * 16 * 8 + 4)
    projections = 3 * 2 * 2 * 64 * 16 * 8
    assert shared.forward.flops == own.forward.flops - projections


@pytest.mark.parametrize(
    "kv_layers", [(0, 1, 2, 1, 1), (0, 1, 2, 3, 3, 6), (0, 0, 1, 3, 4, 5), (0, 1, 2, 3, 5, 4), (0, 1, 2, -1, 4, 5)]
)
def test_wrong_indices_are_refused(kv_layers: tuple[int, ...]) -> None:
    rule = "kv_layers must be 6 indices, each of its own layer or of an earlier one that reads its own"
    with pytest.raises(ValueError, match=rule):
        dataclasses.replace(CONFIG, kv_layers=kv_layers)


def test_a_short_convolution_is_refused() -> None:
    with pytest.raises(ValueError, match="kv_layers must be None with a short_convolution"):
        dataclasses.replace(CONFIG, short_convolution=3)
