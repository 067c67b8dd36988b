"""Decoders that mix the first layer's values into later layers: by hand, caches, packed texts, files and refusals."""

import dataclasses
import json
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import saccade as sc
from saccade import masks
from saccade.distributed import tp_plan
from saccade.models import Decoder, DecoderConfig, LayerPattern, generate
from saccade.nn import (
    DecoderLayer,
    DecoderStack,
    FeedForward,
    MultiHeadAttention,
    NativeSparseAttention,
    SharedKeyAttention,
)
from saccade.support.errors import UnsupportedError

CONFIG = DecoderConfig(
    vocab_size=30,
    max_len=64,
    embed_dim=16,
    num_heads=4,
    num_kv_heads=2,
    num_layers=3,
    feed_forward_dim=24,
    layers=(LayerPattern(masks.sliding_window(5)), LayerPattern(rotary_base=1e6)),
    value_residual=True,
)
TOKENS = torch.randint(0, 30, (2, 17), generator=torch.Generator().manual_seed(0))


def _decoder(config: DecoderConfig = CONFIG) -> Decoder:
    torch.manual_seed(0)
    decoder = Decoder(config).double()
    with torch.no_grad():
        for parameter in decoder.parameters():
            parameter.add_(0.2 * torch.randn_like(parameter))
    return decoder.eval()


def _by_hand(decoder: Decoder, tokens: Tensor) -> Tensor:
    """The decoder's output with every weight of attention written out."""
    x, first = decoder.embedding(tokens), None
    length = tokens.shape[1]
    row, column = torch.arange(length)[:, None], torch.arange(length)
    for index, layer in enumerate(decoder.stack.layers):
        own, y = layer.attention, layer.attention_norm(x)
        query, key, value = (
            project(y).unflatten(2, (-1, 4)).transpose(1, 2)
            for project in (own.query_projection, own.key_projection, own.value_projection)
        )
        if first is None:
            first = value
        else:
            weights = decoder.stack.value_weights[index - 1]
            value = weights[0] * first + weights[1] * value
        query, key = (own.rotary(one, range(length)) for one in (query, key))
        key, value = (one.repeat_interleave(2, 1) for one in (key, value))
        hidden = (column > row) | ((row - column >= 5) & (index != 1))
        scores = (query @ key.mT / 2).masked_fill(hidden, -torch.inf)
        x = x + own.output_projection((scores.softmax(-1) @ value).transpose(1, 2).flatten(2))
        x = x + layer.feed_forward(layer.feed_forward_norm(x))
    return decoder.logits(decoder.stack.final_norm(x))


def test_outputs_and_gradients_are_those_written_by_hand() -> None:
    decoder = _decoder()
    parameters = list(decoder.parameters())
    out, expected = decoder(TOKENS), _by_hand(decoder, TOKENS)
    torch.testing.assert_close(out, expected)
    grad = torch.randn_like(out)
    own, theirs = (torch.autograd.grad(x, parameters, grad) for x in (out, expected))
    torch.testing.assert_close(own, theirs)
    assert decoder.stack.value_weights.shape == (2, 2)
    assert torch.equal(Decoder(CONFIG).stack.value_weights, torch.full((2, 2), 0.5))


@torch.no_grad()
def test_weights_of_0_and_1_are_the_plain_decoder() -> None:
    decoder, plain = _decoder(), _decoder(dataclasses.replace(CONFIG, value_residual=False))
    plain.load_state_dict({name: x for name, x in decoder.state_dict().items() if "value_weights" not in name})
    decoder.stack.value_weights.copy_(torch.tensor([0.0, 1.0]))
    torch.testing.assert_close(decoder(TOKENS), plain(TOKENS))
    assert plain.stack.value_weights is None


@torch.no_grad()
@pytest.mark.parametrize("sizes", [(16, 1), (1,) * 17, (3, 9, 5)], ids=str)
def test_prefill_and_any_steps_are_the_whole_run(sizes: tuple[int, ...]) -> None:
    decoder = _decoder()
    cache, parts = decoder.new_cache(), TOKENS.split(list(sizes), 1)
    out = torch.cat([decoder(part, cache=cache) for part in parts], 1)
    torch.testing.assert_close(out, decoder(TOKENS))
    tokens = TOKENS[:1, :9]
    for _ in range(6):
        tokens = torch.cat([tokens, decoder(tokens)[:, -1:].argmax(-1)], 1)
    assert generate(decoder, TOKENS[:1, :9], max_new_tokens=6) == tokens[:, 9:].tolist()


@torch.no_grad()
def test_packed_and_padded_texts_are_alone() -> None:
    decoder, texts = _decoder(), [TOKENS[0, :n] for n in (7, 1, 9)]
    packed = sc.pack(texts)
    for text, out in zip(texts, packed.unpack(decoder(packed.tokens, mask=packed.mask())), strict=True):
        torch.testing.assert_close(out, decoder(text[None])[0])
    padded = decoder(TOKENS, mask=masks.Padding([17, 6]))
    torch.testing.assert_close(padded[1, :6], decoder(TOKENS[1:, :6])[0])


def test_matrices_are_those_that_the_decoder_uses() -> None:
    decoder, third = _decoder(), []
    handle = decoder.stack.layers[2].register_forward_pre_hook(lambda _, given: third.append(given[0]))
    decoder(TOKENS)
    handle.remove()
    own = decoder.stack.layers[2].matrix(third[0])
    torch.testing.assert_close(decoder.matrices(TOKENS)[2].to_dense(), own.to_dense().detach())


@pytest.mark.parametrize("layers", [CONFIG.layers, None])
def test_files_hold_the_weights(layers: tuple[LayerPattern, ...] | None, tmp_path: Path) -> None:
    decoder = _decoder(dataclasses.replace(CONFIG, layers=layers)).float()
    decoder.save_pretrained(tmp_path)
    assert json.loads((tmp_path / "config.json").read_text())["model_type"] == "saccade-decoder"
    loaded = Decoder.from_pretrained(tmp_path)
    assert loaded.config == decoder.config
    assert torch.equal(loaded(TOKENS), decoder(TOKENS))


def _checkpointed(decoder: Decoder, *, use_reentrant: bool) -> Decoder:
    for layer in decoder.stack.layers:
        inner = layer.forward

        def run(x: Tensor, *others: object, inner: object = inner, **options: object) -> Tensor:
            return checkpoint(lambda y: inner(y, *others, **options), x, use_reentrant=use_reentrant)

        layer.forward = run
    return decoder


def _stack(*attentions: nn.Module, **options: object) -> DecoderStack:
    return DecoderStack([DecoderLayer(own, FeedForward(16, 8)) for own in attentions], **options)


def test_recomputed_layers_have_all_gradients_or_are_refused() -> None:
    decoder, other = _decoder(), _checkpointed(_decoder(), use_reentrant=False)
    grads = [torch.autograd.grad(one(TOKENS).square().sum(), list(one.parameters())) for one in (decoder, other)]
    torch.testing.assert_close(*grads)
    refused = _checkpointed(_decoder(), use_reentrant=True)
    with pytest.raises(UnsupportedError, match="ran without gradients, so theirs would be lost"):
        refused(TOKENS).square().sum().backward()


ATTENTION = {"mask": masks.Causal()}
REFUSED = {
    "one layer": (MultiHeadAttention(16, 4, **ATTENTION),),
    "heads": (MultiHeadAttention(16, 4, **ATTENTION), MultiHeadAttention(16, 4, num_kv_heads=2, **ATTENTION)),
    "width": (MultiHeadAttention(16, 4, **ATTENTION), MultiHeadAttention(16, 4, head_dim=8, **ATTENTION)),
    "shared keys": (MultiHeadAttention(16, 4, **ATTENTION), SharedKeyAttention(16, 4, 0, **ATTENTION)),
    "selected keys": (NativeSparseAttention(16, 4, **ATTENTION), MultiHeadAttention(16, 4, **ATTENTION)),
}


@pytest.mark.parametrize("name", REFUSED)
def test_layers_whose_values_cannot_be_mixed_are_refused(name: str) -> None:
    with pytest.raises(ValueError, match="value_residual must be False unless several layers"):
        _stack(*REFUSED[name], value_residual=True)


def test_what_value_residuals_do_not_support_is_refused() -> None:
    cross = MultiHeadAttention(16, 4)
    layers = [
        DecoderLayer(MultiHeadAttention(16, 4, **ATTENTION), FeedForward(16, 8), cross_attention=cross)
        for _ in range(2)
    ]
    with pytest.raises(ValueError, match="value_residual must be False unless several layers"):
        DecoderStack(layers, value_residual=True)
    with pytest.raises(ValueError, match="kv_layers must be None with a value_residual"):
        dataclasses.replace(CONFIG, kv_layers=(0, 1, 1))
    stack = _decoder().float().stack
    nested = torch.nested.nested_tensor([torch.randn(3, 16), torch.randn(5, 16)], layout=torch.jagged)
    with pytest.raises(UnsupportedError, match="only dense tensors are supported here"):
        stack(nested)
    with pytest.raises(UnsupportedError, match="value_weights would get the gradient of each rank's heads only"):
        tp_plan(_decoder(), 2)
