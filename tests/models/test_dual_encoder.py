"""A dual encoder equals transformers' CLIP, padding included, and says what it refuses."""

import re

import pytest
import torch
from torch.nn import functional as F
from transformers import CLIPConfig, CLIPModel

from saccade import masks
from saccade.models import Decoder, DecoderConfig, DualEncoder, VisionTransformer, VisionTransformerConfig
from saccade.support.errors import UnsupportedError

SIZES = {"hidden_size": 24, "num_hidden_layers": 2, "num_attention_heads": 3, "intermediate_size": 40}
END, LENGTH = 49, 12
LENGTHS = torch.tensor([LENGTH, 5, 8, 3])


def published(eos=END, **words):
    """A CLIP with weights large enough that a wrong detail shows."""
    torch.manual_seed(0)
    text = {**SIZES, "vocab_size": 50, "max_position_embeddings": LENGTH, "eos_token_id": eos}
    vision = {**SIZES, "hidden_size": 32, "num_attention_heads": 4, "image_size": 16, "patch_size": 4}
    config = CLIPConfig(
        text_config={**text, "bos_token_id": 0, "pad_token_id": 1, **words},
        vision_config={**vision, **words},
        projection_dim=20,
    )
    theirs = CLIPModel(config).eval()
    for parameter in theirs.parameters():
        if parameter.dim():
            torch.nn.init.normal_(parameter, std=0.2)
    return theirs


def inputs(pictures=5, seed=1):
    generator = torch.Generator().manual_seed(seed)
    tokens = torch.randint(3, END, (4, LENGTH), generator=generator)
    tokens[torch.arange(4), LENGTHS - 1] = END
    return torch.randn(pictures, 3, 16, 16, generator=generator), tokens


PADDINGS = {
    "none": None,
    "right": (torch.arange(LENGTH) < LENGTHS[:, None]).long(),
    "holes": (torch.rand(4, LENGTH, generator=torch.Generator().manual_seed(2)) > 0.3).long(),
}
PADDINGS["holes"][:, 0] = 1  # whoever sees nobody gets 0 here and the mean of all in theirs


@pytest.mark.ci
@torch.no_grad()
@pytest.mark.parametrize("padding", PADDINGS)
@pytest.mark.parametrize("activation", ["quick_gelu", "gelu"])
@pytest.mark.parametrize("eos", [2, END], ids=["highest token", "end token"])
def test_logits_equal_clip(eos, activation, padding):
    theirs, (images, tokens), real = published(eos, hidden_act=activation), inputs(), PADDINGS[padding]
    ours = DualEncoder.from_state_dict(theirs.config, theirs.state_dict())
    want = theirs(input_ids=tokens, pixel_values=images, attention_mask=real)
    mask = None if real is None else masks.from_attention_mask(real)
    got = ours.similarity(images, tokens, mask=mask)
    torch.testing.assert_close(got, want.logits_per_image, atol=1e-5, rtol=1e-5)
    torch.testing.assert_close(ours(images, tokens, mask=mask), got)
    torch.testing.assert_close(ours.embed_images(images), want.image_embeds, atol=1e-5, rtol=1e-5)
    torch.testing.assert_close(ours.embed_texts(tokens, mask=mask), want.text_embeds, atol=1e-5, rtol=1e-5)
    loss = theirs(input_ids=tokens, pixel_values=images[:4], attention_mask=real, return_loss=True).loss
    torch.testing.assert_close(ours.loss(images[:4], tokens, mask=mask), loss, atol=1e-5, rtol=1e-5)


@torch.no_grad()
def test_folders_old_words_and_other_dtypes(tmp_path):
    theirs, (images, tokens) = published(), inputs()
    want = theirs(input_ids=tokens, pixel_values=images).logits_per_image
    theirs.save_pretrained(tmp_path)
    ours = DualEncoder.from_pretrained(tmp_path)
    torch.testing.assert_close(ours(images, tokens), want, atol=1e-5, rtol=1e-5)
    assert not ours.training
    told = theirs.config.to_dict()
    told |= {f"{part}_dict": told[part] for part in ("text_config", "vision_config")}
    told |= {"text_config": {"hidden_size": 7}, "vision_config": None}
    older = {f"{part}_model.embeddings.position_ids": torch.arange(3) for part in ("text", "vision")}
    ours = DualEncoder.from_state_dict(told, theirs.state_dict() | older, dtype=torch.float64)
    torch.testing.assert_close(ours(images.double(), tokens), want.double(), atol=1e-5, rtol=1e-5)


@torch.no_grad()
def test_config_defaults_are_those_of_the_first_clip():
    from saccade.models.vision_formats import DEFAULTS  # noqa: PLC0415

    told = CLIPConfig().to_dict()
    for part, words in DEFAULTS.items():
        assert {key: told[part][key] for key in words} == words


def small(**changes):
    torch.manual_seed(0)
    sizes = {"embed_dim": 16, "num_heads": 2, "num_layers": 1, "feed_forward_dim": 24}
    pictures = VisionTransformer(VisionTransformerConfig(image_size=(8, 8), patch_size=4, **sizes))
    texts = Decoder(
        DecoderConfig(vocab_size=20, max_len=8, **{**sizes, "embed_dim": 12, "end_tokens": (19, 18), **changes})
    )
    return DualEncoder(pictures, texts, 10)


def test_a_text_ends_at_its_first_end_token_and_nothing_after_it_counts():
    model, tokens = small().eval(), torch.tensor([[3, 18, 19, 4, 5], [3, 4, 5, 6, 19]])
    hidden = model.text_encoder.hidden(tokens)
    want = model.text_projection(torch.stack([hidden[0, 1], hidden[1, 4]]))
    torch.testing.assert_close(model.embed_texts(tokens), F.normalize(want, dim=-1))
    changed = torch.tensor([[3, 18, 1, 1, 1], [3, 4, 5, 6, 19]])
    torch.testing.assert_close(model.embed_texts(changed), model.embed_texts(tokens))
    torch.testing.assert_close(model.embed_texts(tokens[:1, :2]), model.embed_texts(tokens)[:1])


def test_the_temperature_is_learned_and_pairs_find_each_other():
    model = small()
    images, tokens = torch.randn(6, 3, 8, 8), torch.arange(6)[:, None].expand(6, 3).contiguous()
    tokens[:, 2] = 19
    torch.testing.assert_close(model.log_scale.exp(), torch.tensor(1 / 0.07))
    first = model.loss(images, tokens)
    optimizer = torch.optim.Adam(model.parameters(), 3e-3)
    for _ in range(60):
        optimizer.zero_grad()
        loss = model.loss(images, tokens)
        loss.backward()
        assert model.log_scale.grad.abs() > 0
        optimizer.step()
    assert loss < first / 4
    logits = model.eval().similarity(images, tokens)
    assert torch.equal(logits.argmax(0), torch.arange(6))
    assert torch.equal(logits.argmax(1), torch.arange(6))


IMAGES, TOKENS = torch.zeros(2, 3, 8, 8), torch.tensor([[1, 19], [2, 19]])
REFUSED = {
    "no end": (
        lambda m: m(IMAGES, TOKENS[:, :1]),
        ValueError,
        "tokens must have an end token in each text, one of (19, 18)",
    ),
    "no tokens": (lambda m: m(IMAGES, TOKENS[:, :0]), ValueError, "tokens must have at least one token for each text"),
    "a stranger": (lambda m: m(IMAGES, TOKENS + 1), ValueError, "tokens must be from 0 to 19, the vocabulary; got 20"),
    "floats": (lambda m: m(IMAGES, TOKENS.float()), TypeError, "tokens must be int64 or int32"),
    "no tensor": (lambda m: m(IMAGES, [[1]]), TypeError, "tokens must be a tensor; got list"),
    "a lonely text": (
        lambda m: m.loss(IMAGES, TOKENS[:1]),
        ValueError,
        "tokens must be 2 texts, one for each image; got 1",
    ),
    "a small picture": (lambda m: m(IMAGES[..., :4], TOKENS), ValueError, "images must be 8x8; got 8x4"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_calls_that_do_not_fit_are_refused(name):
    wrong, kind, message = REFUSED[name]
    with pytest.raises(kind, match=re.escape(message)):
        wrong(small())


def test_parts_of_other_kinds_are_refused():
    model = small()
    with pytest.raises(TypeError, match=r"image_encoder must be a saccade\.models\.VisionTransformer; got Linear"):
        DualEncoder(torch.nn.Linear(2, 2), model.text_encoder, 8)
    with pytest.raises(TypeError, match=r"text_encoder must be a saccade\.models\.Decoder; got VisionTransformer"):
        DualEncoder(model.image_encoder, model.image_encoder, 8)
    with pytest.raises(ValueError, match="embed_dim must be an int of at least 1; got 0"):
        DualEncoder(model.image_encoder, model.text_encoder, 0)


def without(state, name):
    return {own: x for own, x in state.items() if own != name}


UNREAD = {
    "another family": ({"model_type": "siglip"}, lambda s: s, UnsupportedError, "model_type is 'siglip', not 'clip'"),
    "an unknown activation": (
        {"text_config": {"hidden_act": "mish"}},
        lambda s: s,
        UnsupportedError,
        "hidden_act is 'mish', not one of gelu",
    ),
    "words of a wrong type": (
        {"vision_config": {"hidden_size": "wide"}},
        lambda s: s,
        ValueError,
        "hidden_size in vision_config of config.json must be an int",
    ),
    "no words": ({"vision_config": 3}, lambda s: s, TypeError, "vision_config of config.json must be an object"),
    "no scale": ({}, lambda s: without(s, "logit_scale"), ValueError, "missing     logit_scale"),
    "too much": ({}, lambda s: s | {"more": torch.ones(1)}, ValueError, "unexpected  more"),
    "too wide": (
        {"projection_dim": 21},
        lambda s: s,
        ValueError,
        "mismatched  visual_projection.weight [20, 32], not [21, 32]",
    ),
    "far too wide": ({"projection_dim": 2**31 - 1}, lambda s: s, ValueError, "not [2147483647, 32]"),
    "a number": (
        {},
        lambda s: s | {"logit_scale": 1},
        TypeError,
        "state_dict['logit_scale'] must be a tensor; got int",
    ),
    "too little": (
        {},
        lambda s: without(s, "text_model.final_layer_norm.weight"),
        ValueError,
        "missing     final_layer_norm.weight",
    ),
    "no state": ({}, list, TypeError, "state_dict must be a state dict of tensors; got list"),
}


@pytest.mark.parametrize("name", UNREAD)
def test_other_checkpoints_are_refused(name):
    words, change, kind, message = UNREAD[name]
    theirs = published()
    told = theirs.config.to_dict()
    merged = {key: told[key] | own if isinstance(own, dict) else own for key, own in words.items()}
    with pytest.raises(kind, match=re.escape(message)):
        DualEncoder.from_state_dict(told | merged, change(theirs.state_dict()))
