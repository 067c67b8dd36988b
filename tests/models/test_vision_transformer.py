"""A Vision Transformer equals transformers', reads its files, and says what it refuses."""

import re

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.nn import functional as F
from transformers import CLIPVisionConfig, CLIPVisionModel, ViTConfig, ViTForImageClassification, ViTModel

from saccade import masks
from saccade.models import VisionTransformer, VisionTransformerConfig
from saccade.positions import Sinusoidal
from saccade.support.errors import UnsupportedError

SIZES = {"embed_dim": 16, "num_heads": 2, "num_layers": 2, "feed_forward_dim": 24}
CONFIG = {"image_size": (8, 12), "patch_size": 4, **SIZES}
THEIRS = {"hidden_size": 24, "num_hidden_layers": 2, "num_attention_heads": 3, "intermediate_size": 40}


def new_model(**changes):
    torch.manual_seed(0)
    model = VisionTransformer(VisionTransformerConfig(**{**CONFIG, **changes}))
    for parameter in model.parameters():
        torch.nn.init.normal_(parameter, std=0.3)
    return model.double().eval()


def published(kind, **words):
    """A model of transformers' with weights large enough that a wrong detail shows."""
    torch.manual_seed(0)
    is_clip = kind is CLIPVisionModel
    config = (CLIPVisionConfig if is_clip else ViTConfig)(**{**THEIRS, "image_size": 16, "patch_size": 4, **words})
    theirs = kind(config).eval()
    for parameter in theirs.parameters():
        torch.nn.init.normal_(parameter, std=0.3)
    return theirs


def run(theirs, images):
    out = theirs(images)
    return out.logits if hasattr(out, "logits") else out


@pytest.mark.ci
@torch.no_grad()
@settings(max_examples=25, deadline=None)
@given(st.data())
def test_hidden_states_and_logits_equal_transformers(data):
    draw = data.draw
    side, heads = draw(st.integers(1, 5)), draw(st.integers(1, 4))
    size = [side * draw(st.integers(1, 4)) for _ in range(2)]
    words = {
        "image_size": draw(st.sampled_from([tuple(size), size])),
        "patch_size": draw(st.sampled_from([side, [side, side]])),
        "hidden_size": heads * draw(st.integers(1, 6)),
        "num_attention_heads": heads,
        "num_channels": draw(st.integers(1, 4)),
        "hidden_act": draw(st.sampled_from(["gelu", "gelu_new", "quick_gelu", "relu"])),
        "layer_norm_eps": draw(st.sampled_from([1e-12, 1e-3])),
        "num_labels": draw(st.integers(1, 9)),
    }
    theirs = published(ViTForImageClassification, **words).double()
    told = draw(st.sampled_from([theirs.config, theirs.config.to_dict()]))
    ours = VisionTransformer.from_state_dict(told, theirs.state_dict(), dtype=torch.float64)
    images = torch.randn(draw(st.integers(1, 2)), words["num_channels"], *size, dtype=torch.float64)
    torch.testing.assert_close(ours(images), theirs(images).logits, atol=1e-9, rtol=1e-7)
    bare = VisionTransformer.from_state_dict(told, theirs.vit.state_dict(), dtype=torch.float64)
    torch.testing.assert_close(bare.hidden(images), theirs.vit(images).last_hidden_state, atol=1e-9, rtol=1e-7)


@pytest.mark.parametrize("kind", [ViTModel, ViTForImageClassification, CLIPVisionModel])
def test_folders_and_states_are_read_alike(kind, tmp_path):
    theirs, images = published(kind), torch.randn(2, 3, 16, 16)
    theirs.save_pretrained(tmp_path)  # under other names than those in memory
    with torch.no_grad():
        out = run(theirs, images)
        want = out if isinstance(out, torch.Tensor) else out.pooler_output if kind is CLIPVisionModel else out[0][:, 0]
        for ours in (
            VisionTransformer.from_pretrained(tmp_path),
            VisionTransformer.from_state_dict(theirs.config, theirs.state_dict()),
        ):
            torch.testing.assert_close(ours(images), want, atol=1e-5, rtol=1e-5)
            assert not ours.training


def test_matrices_are_those_of_transformers():
    theirs, images = published(ViTModel, attn_implementation="eager"), torch.randn(2, 3, 16, 16)
    ours = VisionTransformer.from_state_dict(theirs.config, theirs.state_dict())
    with torch.no_grad():
        matrices, want = ours.matrices(images), theirs(images, output_attentions=True).attentions
        for own, other in zip(matrices, want, strict=True):
            torch.testing.assert_close(own.to_dense(), other, atol=1e-5, rtol=1e-4)


def test_a_token_that_is_not_there_is_not_pooled():
    with pytest.raises(ValueError, match="pooling must be 'mean' without a class token"):
        new_model(class_token=False)


@pytest.mark.parametrize("class_token, pooling", [(True, "class_token"), (True, "mean"), (False, "mean")])
@pytest.mark.parametrize("position_encoding", ["learned", "sinusoidal"])
def test_an_image_becomes_tokens(class_token, position_encoding, pooling):
    words = {"class_token": class_token, "position_encoding": position_encoding, "pooling": pooling}
    model, images = new_model(**words, num_classes=5), torch.randn(2, 3, 8, 12, dtype=torch.float64)
    squares = images.unfold(2, 4, 4).unfold(3, 4, 4)  # [batch, channels, rows, columns, 4, 4]
    x = squares.permute(0, 2, 3, 1, 4, 5).flatten(3).flatten(1, 2) @ model.patch.weight.flatten(1).T + model.patch.bias
    if position_encoding == "sinusoidal":
        half = Sinusoidal(8).double()
        x = x + torch.cat([half(torch.arange(6) // 3), half(torch.arange(6) % 3)], -1)
    if class_token:
        x = torch.cat([model.class_token.weight.expand(2, 1, -1), x], 1)
    if position_encoding == "learned":
        x = x + model.position.weight
    hidden = model.stack(x)
    torch.testing.assert_close(model.hidden(images), hidden)
    pooled = hidden[:, 0] if pooling == "class_token" else hidden[:, int(class_token) :].mean(1)
    torch.testing.assert_close(model.embed(images), pooled)
    torch.testing.assert_close(model(images), F.linear(pooled, model.head.weight, model.head.bias))


def test_waves_know_no_size():
    model = new_model(position_encoding="sinusoidal")
    images = torch.randn(1, 3, 20, 16, dtype=torch.float64)
    assert model.hidden(images).shape == (1, 21, 16)
    moved = model.hidden(images.roll(4, 3))
    assert not torch.allclose(moved.sort(1).values, model.hidden(images).sort(1).values)


def test_a_mask_holds_in_every_layer_and_the_class_token_stands_before_the_grid():
    near = masks.Neighborhood(2, 3, 1).after(1)
    images = torch.randn(1, 3, 8, 12, dtype=torch.float64)
    called, own = new_model().matrices(images, mask=near), new_model(mask=near).matrices(images)
    for matrix, other in zip(called, own, strict=True):
        assert torch.equal(matrix.to_dense()[0, 0] > 0, near.to_dense(7)[0, 0])
        torch.testing.assert_close(matrix.to_dense(), other.to_dense())


def test_pictures_are_learned():
    torch.manual_seed(0)
    model = VisionTransformer(VisionTransformerConfig(**CONFIG, num_classes=2))
    images, wanted = torch.randn(16, 3, 8, 12), torch.arange(16) % 2
    optimizer = torch.optim.Adam(model.parameters(), 3e-3)
    for _ in range(60):
        loss = F.cross_entropy(model(images), wanted)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    assert torch.equal(model(images).argmax(-1), wanted)


@pytest.mark.parametrize(
    "changes, message",
    [
        ({"image_size": (8, 10)}, "image_size must be a height and a width, multiples of patch_size 4; got (8, 10)"),
        ({"image_size": (8,)}, "image_size must be a height and a width"),
        ({"image_size": (0, 4)}, "image_size must be a height and a width"),
        ({"patch_size": 0}, "patch_size must be an int of at least 1; got 0"),
        ({"num_heads": 3}, "num_heads must divide embed_dim 16; got 3"),
        ({"embed_dim": 18, "position_encoding": "sinusoidal"}, "embed_dim must be a multiple of 4"),
        ({"position_encoding": "rotary"}, "position_encoding must be one of 'learned', 'sinusoidal'; got 'rotary'"),
        ({"pooling": "max"}, "pooling must be one of 'class_token', 'mean'; got 'max'"),
    ],
)
def test_a_config_that_fits_no_model_is_refused(changes, message):
    with pytest.raises(ValueError, match=re.escape(f"VisionTransformerConfig: {message}")):
        VisionTransformerConfig(**{**CONFIG, **changes})


@pytest.mark.parametrize(
    "images, kind, message",
    [
        (torch.zeros(3, 8, 12), ValueError, "images must have shape [batch, channels, H, W]"),
        (torch.zeros(1, 1, 8, 12), ValueError, "images must have shape [batch, channels, H, W] = [batch, 3, H, W]"),
        (torch.zeros(1, 3, 8, 0), ValueError, "images must have at least one row and column"),
        (torch.zeros(1, 3, 12, 8), ValueError, "images must be 8x12; got 12x8.\nHint: position vectors are learned"),
        (torch.zeros(1, 3, 8, 12).half(), ValueError, "images must be float64, like the parameters; got float16"),
        ([[0]], TypeError, "images must be a tensor; got list"),
    ],
)
def test_pictures_that_do_not_fit_are_refused(images, kind, message):
    images = images.double() if isinstance(images, torch.Tensor) and images.dtype == torch.float32 else images
    with pytest.raises(kind, match=re.escape(f"VisionTransformer: {message}")):
        new_model()(images)


def test_patches_that_do_not_fit_into_a_picture_are_refused():
    model = new_model(position_encoding="sinusoidal")
    with pytest.raises(ValueError, match="images must have sides that are multiples of 4, as patches; got 8x10"):
        model(torch.zeros(1, 3, 8, 10, dtype=torch.float64))
    with pytest.raises(TypeError, match=r"config must be a saccade\.models\.VisionTransformerConfig; got dict"):
        VisionTransformer({})


REFUSED = {
    "another family": ({"model_type": "swin"}, "model_type is 'swin', not one of vit, clip_vision_model"),
    "a bias for some": ({"qkv_bias": False}, "qkv_bias is false"),
    "an unknown activation": ({"hidden_act": "mish"}, "hidden_act is 'mish', not one of gelu"),
    "patches that are no squares": ({"patch_size": [4, 2]}, "patch_size is [4, 2]: saccade needs square patches"),
    "patches of no size": ({"patch_size": []}, "patch_size is []: saccade needs square patches"),
    "a rest": ({"patch_size": 5}, "image_size [16, 16] is not a multiple of patch_size 5"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_settings_that_change_the_result_are_refused(name):
    words, message = REFUSED[name]
    theirs = published(ViTModel)
    with pytest.raises(UnsupportedError, match=re.escape(message)):
        VisionTransformer.from_state_dict(theirs.config.to_dict() | words, theirs.state_dict())


@pytest.mark.parametrize(
    "words, message",
    [
        ({"hidden_size": "wide"}, "hidden_size in config.json must be an int"),
        ({"image_size": "large"}, "image_size in config.json must be an int or a list of ints"),
        ({"image_size": None}, "config.json must have hidden_size"),
        ({"hidden_size": 3 * 2**28}, "config.json must state sizes that match the weights"),
        ({"num_hidden_layers": 10**6}, "config.json must state sizes that match the weights"),
        ({"image_size": 2**20}, "config.json must state sizes that match the weights"),
        ({"num_channels": 2**30}, "config.json must state sizes that match the weights"),
        ({"image_size": 2**20, "patch_size": 2**20}, "config.json must state sizes that match the weights"),
        ({"image_size": 32}, "mismatched  embeddings.position_embeddings.weight [17, 24], not [65, 24]"),
    ],
)
def test_a_config_that_the_weights_do_not_bear_out_is_refused(words, message):
    theirs = published(ViTModel)
    with pytest.raises(ValueError, match=re.escape(message)):
        VisionTransformer.from_state_dict(theirs.config.to_dict() | words, theirs.state_dict())


def test_no_state_dict_is_refused():
    with pytest.raises(TypeError, match="state_dict must be a state dict of tensors; got list"):
        VisionTransformer.from_state_dict(published(ViTModel).config, [])
