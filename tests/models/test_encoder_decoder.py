"""An encoder-decoder equals torch's, knows no padding, and writes with a cache what it writes without."""

import copy
import json
import math

import pytest
import torch
from torch.nn import functional as F

from saccade.caches import padded_positions
from saccade.models import Decoder, EncoderDecoder, EncoderDecoderConfig, beam_search, generate
from saccade.nn import to_torch
from saccade.support.errors import UnsupportedError

SIZES = {
    "vocab_size": 20,
    "max_len": 24,
    "embed_dim": 16,
    "num_heads": 4,
    "num_encoder_layers": 3,
    "num_decoder_layers": 2,
    "feed_forward_dim": 24,
}
CONFIGS = {
    "paper": {},
    "norm first": {"norm_first": True, "activation": "gelu", "position_encoding": "learned"},
    "rotary": {"norm_first": True, "norm": "rms", "gated": True, "position_encoding": "rotary", "activation": "silu"},
}


def new_model(name="paper", **changes):
    torch.manual_seed(0)
    model = EncoderDecoder(EncoderDecoderConfig(**{**SIZES, **CONFIGS[name], **changes}))
    for parameter in model.parameters():
        torch.nn.init.normal_(parameter, std=0.3)
    return model.double().eval()


def some_tokens(batch, length, seed=1):
    return torch.randint(0, 20, (batch, length), generator=torch.Generator().manual_seed(seed))


@pytest.mark.parametrize("name", ["paper", "norm first"])
def test_logits_equal_torch_s_transformer(name):
    model = new_model(name)
    source, tokens = some_tokens(2, 7), some_tokens(2, 5, seed=2)
    is_padding = torch.arange(7) >= torch.tensor([7, 4])[:, None]
    encoder = to_torch(model.encoder)
    decoder = copy.deepcopy(model.decoder)
    for layer in decoder.layers:
        layer.attention.mask = None  # torch's takes masks with each call
    decoder = to_torch(decoder)

    def embedded(tokens):
        n = tokens.shape[1]
        if name == "paper":
            angles = torch.arange(n)[:, None] / 10000 ** (torch.arange(0, 16, 2).double() / 16)
            place = torch.stack([angles.sin(), angles.cos()], -1).flatten(1)
        else:
            place = model.position.weight[:n]
        return model.embedding.weight[tokens] * math.sqrt(16) + place

    with torch.no_grad():
        memory = encoder(embedded(source), src_key_padding_mask=is_padding)
        later = torch.ones(5, 5).triu(1).bool()
        out = decoder(embedded(tokens), memory, tgt_mask=later, memory_key_padding_mask=is_padding)
        got = model(source, tokens, source_positions=padded_positions([7, 4]))
    torch.testing.assert_close(got, F.linear(out, model.embedding.weight))


@pytest.mark.parametrize("name", CONFIGS)
def test_any_split_equals_the_full_run(name):
    model, source, tokens = new_model(name), some_tokens(2, 7), some_tokens(2, 9, seed=2)
    place = padded_positions([7, 4])
    with torch.no_grad():
        full = model(source, tokens, source_positions=place)
        for lengths in ((4, 1, 1, 3), (1,) * 9):
            writer = model.given(source, source_positions=place)
            cache = writer.new_cache()
            parts = [writer(part, cache=cache) for part in tokens.split(lengths, 1)]
            torch.testing.assert_close(torch.cat(parts, 1), full)


@pytest.mark.parametrize("side", ["left", "right"])
@pytest.mark.parametrize("name", CONFIGS)
def test_padding_changes_nothing(name, side):
    model, sources, texts = new_model(name), some_tokens(3, 8), some_tokens(3, 6, seed=2)
    source_lengths, lengths = (3, 8, 5), (6, 2, 4)

    def padded(tokens, place):
        whole = torch.zeros_like(place)
        for row in range(3):
            n = int((place[row] >= 0).sum())
            whole[row][place[row] >= 0] = tokens[row, :n]
        return whole

    source_place, place = padded_positions(source_lengths, side=side), padded_positions(lengths, side=side)
    with torch.no_grad():
        got = model(padded(sources, source_place), padded(texts, place), source_positions=source_place, positions=place)
        for row in range(3):
            alone = model(sources[row : row + 1, : source_lengths[row]], texts[row : row + 1, : lengths[row]])
            torch.testing.assert_close(got[row][place[row] >= 0], alone[0])


def test_the_source_is_projected_once():
    model, source, tokens = new_model(), some_tokens(1, 7), some_tokens(1, 4, seed=2)
    writer = model.given(source)
    cache = writer.new_cache()
    projected, encoded = [], []
    for layer in model.decoder.layers:
        layer.cross_attention.key_projection.register_forward_hook(lambda *given: projected.append(1))
    model.encoder.layers[0].register_forward_hook(lambda *given: encoded.append(1))
    with torch.no_grad():
        for part in tokens.split(1, 1):
            writer(part, cache=cache)
    assert len(projected) == 2
    assert encoded == []


@pytest.mark.parametrize("name", CONFIGS)
def test_generation_reads_each_text_its_own_source(name):
    model, sources = new_model(name), some_tokens(3, 8)
    torch.nn.init.normal_(model.embedding.weight, std=1.0)  # so that no token is the likeliest everywhere
    for norm, bias in model.named_parameters():
        if norm.endswith("norm.bias"):
            torch.nn.init.zeros_(bias)
    lengths = (3, 8, 5)
    place = padded_positions(lengths)
    prompts = [[1], [2, 3], [4, 5, 6]]

    def greedy(source, prompt):
        tokens = list(prompt)
        for _ in range(5):
            with torch.no_grad():
                tokens.append(int(model(source, torch.tensor([tokens]))[0, -1].argmax()))
        return tokens[len(prompt) :]

    alone = [greedy(sources[row : row + 1, : lengths[row]], prompts[row]) for row in range(3)]
    assert len(set(map(tuple, alone))) > 1
    writer = model.given(sources, source_positions=place)
    assert generate(writer, prompts, 5) == alone
    found = beam_search(writer, prompts, 4, beams=3)
    for row in range(3):
        one = model.given(sources[row : row + 1, : lengths[row]])
        expected = beam_search(one, prompts[row : row + 1], 4, beams=3)[0]
        assert [own.tokens for own in found[row]] == [own.tokens for own in expected]


def test_cross_matrices_are_those_that_forward_multiplies_by():
    model, source, tokens = new_model(), some_tokens(2, 7), some_tokens(2, 5, seed=2)
    place = padded_positions([7, 4])
    seen = []
    for layer in model.decoder.layers:
        layer.cross_attention.mechanism.register_forward_hook(lambda m, args, matrix: seen.append(matrix.to_dense()))
    with torch.no_grad():
        model(source, tokens, source_positions=place)
        expected = list(seen)
        matrices = model.cross_matrices(source, tokens, source_positions=place)
    assert len(matrices) == 2
    for matrix, own in zip(matrices, expected, strict=True):
        assert matrix.shape == (2, 4, 5, 7)
        torch.testing.assert_close(matrix.to_dense(), own)
        assert matrix.to_dense()[1, :, :, 4:].eq(0).all()


@pytest.mark.ci
def test_it_learns_to_reverse():
    torch.manual_seed(0)
    sizes = {**SIZES, "embed_dim": 32, "num_encoder_layers": 1, "num_decoder_layers": 1, "feed_forward_dim": 64}
    model = EncoderDecoder(EncoderDecoderConfig(**sizes, norm_first=True, dropout_p=0.0))
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    for step in range(250):
        source = torch.randint(2, 20, (32, 5), generator=torch.Generator().manual_seed(step))
        target = torch.cat([torch.ones(32, 1, dtype=torch.int64), source.flip(1)], 1)
        loss = F.cross_entropy(model(source, target[:, :-1]).flatten(0, 1), target[:, 1:].flatten())
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    assert all(parameter.grad is not None for parameter in model.parameters())
    source = torch.randint(2, 20, (32, 5), generator=torch.Generator().manual_seed(9999))
    written = torch.tensor(generate(model.eval().given(source), [[1]] * 32, 5))
    assert (written == source.flip(1)).double().mean() > 0.8


@pytest.mark.parametrize(
    "call, kind, message",
    [
        (
            lambda m: m(some_tokens(2, 3), some_tokens(1, 3)),
            ValueError,
            "tokens must have 2 texts, as many as the source; got 1",
        ),
        (lambda m: m(torch.ones(1, 2), some_tokens(1, 3)), TypeError, "EncoderDecoder: source must be int64 or int32"),
        (lambda m: m(some_tokens(1, 3), [[1]]), TypeError, "ConditionedDecoder: tokens must be a tensor; got list"),
        (lambda m: m(torch.tensor([[20]]), some_tokens(1, 3)), ValueError, "source must be from 0 to 19"),
        (
            lambda m: m(some_tokens(1, 3), some_tokens(1, 3), source_positions=range(4)),
            ValueError,
            "positions of source must hold 3 positions; got 4",
        ),
        (lambda m: EncoderDecoderConfig(**{**SIZES, "num_heads": 3}), ValueError, "num_heads must divide embed_dim 16"),
        (lambda m: EncoderDecoderConfig(**{**SIZES, "max_len": 0}), ValueError, "max_len must be an int of at least 1"),
        (lambda m: EncoderDecoderConfig(**SIZES, norm="b"), ValueError, "norm must be one of 'layer', .*; got 'b'"),
        (lambda m: EncoderDecoderConfig(**SIZES, gated=1), TypeError, "gated must be True or False; got 1"),
        (
            lambda m: EncoderDecoderConfig(**SIZES, dropout_p=1.0),
            ValueError,
            "dropout_p must be a finite number of at least 0 and below 1",
        ),
        (
            lambda m: EncoderDecoderConfig(**SIZES, end_tokens=1),
            TypeError,
            "end_tokens must be a tuple of ints; got int",
        ),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_bad_calls_are_named(call, kind, message):
    model = new_model()
    with pytest.raises(kind, match=message):
        call(model)


@pytest.mark.parametrize("name", CONFIGS)
def test_a_folder_gives_the_model_back(name, tmp_path):
    model = new_model(name, end_tokens=(2,)).float()
    model.save_pretrained(tmp_path)
    read = EncoderDecoder.from_pretrained(tmp_path)
    assert read.config == model.config
    assert not read.training
    source, tokens = some_tokens(2, 7), some_tokens(2, 5, seed=2)
    assert torch.equal(read(source, tokens), model(source, tokens))
    config = json.loads((tmp_path / "config.json").read_text())
    assert torch.equal(EncoderDecoder.from_state_dict(config, model.state_dict())(source, tokens), read(source, tokens))
    assert not list(tmp_path.glob("*.part"))
    with pytest.raises(UnsupportedError, match="saccade-encoder-decoder"):
        Decoder.from_pretrained(tmp_path)


def test_folders_that_are_not_its_own_are_refused(tmp_path):
    new_model().save_pretrained(tmp_path)
    told = json.loads((tmp_path / "config.json").read_text())
    for change, message in [
        ({"model_type": "bert"}, "model_type is 'bert'"),
        ({"colour": 1}, "it has colour, which this version does not support"),
    ]:
        (tmp_path / "config.json").write_text(json.dumps({**told, **change}))
        with pytest.raises(UnsupportedError, match=message):
            EncoderDecoder.from_pretrained(tmp_path)
    del told["embed_dim"]
    (tmp_path / "config.json").write_text(json.dumps(told))
    with pytest.raises(ValueError, match="no embed_dim"):
        EncoderDecoder.from_pretrained(tmp_path)
    (tmp_path / "config.json").write_text(json.dumps({**told, "embed_dim": 16, "num_encoder_layers": 10**9}))
    with pytest.raises(ValueError, match="1000000000 layers"):
        EncoderDecoder.from_pretrained(tmp_path)


def test_matrices_of_the_text_that_is_read():
    model, source = new_model(), some_tokens(2, 7)
    found = model.matrices(source)
    seen = []
    for layer in model.encoder.layers:
        layer.attention.mechanism.register_forward_hook(lambda m, args, matrix: seen.append(matrix.to_dense()))
    model.encode(source)
    assert [matrix.shape for matrix in found] == [(2, 4, 7, 7)] * 3
    for matrix, own in zip(found, seen, strict=True):
        torch.testing.assert_close(matrix.to_dense(), own)
