"""Arguments of attention functions in the sources of transformers: supported, refused, or read by none of them."""

import ast
import functools
import pathlib
import re

import pytest
import torch
import transformers
from tests.integrations import model_zoo as zoo
from transformers import LlavaOnevisionConfig, LlavaOnevisionForConditionalGeneration, PaliGemmaConfig, PaliGemmaModel
from transformers.models.inkling2 import modeling_inkling2

import saccade as sc
from saccade.integrations import attention_arguments
from saccade.integrations.transformers import install
from saccade.integrations.transformers_call import AttentionCall

SOURCES = pathlib.Path(transformers.__file__).parent
# Names that transformers' functions use among themselves; no model passes them.
SET_BY_TRANSFORMERS = {
    "attn_implementation",
    "block_size",
    "k",
    "key_length",
    "key_states",
    "max_seqlen_k",
    "max_seqlen_q",
    "q",
    "query_length",
    "query_states",
    "relative_position_embeddings",
    "softmax_scale",
    "supports_mapping",
    "target_dtype",
    "use_top_left_mask",
    "v",
    "value_states",
}
# Functions at the top of a file that are called as attention functions are, or by one with its arguments.
ATTENTION = re.compile(
    r"^def \w+\(\s*(?:module\b[^,]*,\s*q\w*\b|query_length\b|query_states\b).*?(?=^[^\s)]|\Z)", re.MULTILINE | re.DOTALL
)


def parameters(function):
    """Return the names of a function's parameters, and those that it looks up in ``**kwargs``."""
    names = {own.arg for own in function.args.args + function.args.kwonlyargs}
    for node in ast.walk(function):
        match node:
            case ast.Call(
                func=ast.Attribute(value=ast.Name(id="kwargs"), attr="get" | "pop"), args=[ast.Constant(x), *_]
            ):
                names.add(x)
            case ast.Subscript(value=ast.Name(id="kwargs"), slice=ast.Constant(x)):
                names.add(x)
    return names


@functools.cache
def read_by_transformers():
    """Return each argument that an attention function of transformers reads, with one file in which it does."""
    files = [*SOURCES.glob("integrations/*.py"), SOURCES / "modeling_flash_attention_utils.py"]
    functions = {}
    for path in sorted([*files, *SOURCES.glob("models/*/modeling_*.py")]):
        functions |= dict.fromkeys(ATTENTION.findall(path.read_text(encoding="utf-8")), path.name)
    return {name: file for text, file in functions.items() for name in parameters(ast.parse(text).body[0])}


def test_every_argument_that_transformers_reads_is_classified():
    ours = (
        attention_arguments.SUPPORTED,
        attention_arguments.UNSUPPORTED,
        attention_arguments.ENDS,
        attention_arguments.WITHOUT_EFFECT,
    )
    classified = {*SET_BY_TRANSFORMERS}.union(*ours)
    read = read_by_transformers()
    assert {name: file for name, file in read.items() if name not in classified} == {}
    assert {"scaling", "s_aux", "position_bias", "sinks", "cache", "kernel_options", "block_indices"} <= read.keys()


class Layer(torch.nn.Module):
    """A stand-in for an attention layer, with the only attribute that is read."""

    is_causal = False


@pytest.mark.parametrize("name", sorted(attention_arguments.UNSUPPORTED))
def test_arguments_that_change_the_matrix_are_refused(name):
    x = torch.randn(1, 2, 5, 8)
    with pytest.raises(sc.UnsupportedError, match=f"the model passes {name}, which is not supported here"):
        AttentionCall.of(Layer(), x, x, None, {name: torch.ones(1)})


def eager_attention_forward(module, query, key, value, attention_mask, alibi=None, **kwargs):
    """A model's own attention, in this file, that adds slopes to its scores."""


def test_arguments_that_the_eager_attention_reads_are_refused():
    x = torch.randn(1, 2, 5, 8)
    with pytest.raises(sc.UnsupportedError, match="the model passes alibi, which is not supported"):
        AttentionCall.of(Layer(), x, x, None, {"alibi": torch.ones(2)})
    layer = modeling_inkling2.Inkling2SlidingAttention.__new__(modeling_inkling2.Inkling2SlidingAttention)
    torch.nn.Module.__init__(layer)
    with pytest.raises(sc.UnsupportedError, match="the model passes sinks"):
        AttentionCall.of(layer, x, x, None, {"sinks": torch.ones(2), "labels": 1})


WORDS = {
    "shift_labels": torch.arange(22).view(2, 11),
    "ignore_index": -100,
    "label_smoothing": 0.1,
    "num_items_in_batch": torch.tensor(12),
    "vision_feature_layer": -1,
    "vision_feature_select_strategy": "full",
    "a_word_of_mine": 1,
}


@pytest.mark.parametrize("word", WORDS)
def test_words_that_say_nothing_about_attention(word):
    losses, inputs = [], zoo.batch("llama", padded=0)
    for implementation in ("eager", install()):
        network = zoo.model("llama", implementation)
        with torch.no_grad():
            losses.append(network(**inputs, labels=inputs["input_ids"], **{word: WORDS[word]}).loss)
    torch.testing.assert_close(losses[1], losses[0], atol=1e-5, rtol=1e-5)


TEXT = {
    "vocab_size": 99,
    "hidden_size": 32,
    "num_hidden_layers": 1,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "intermediate_size": 37,
    "pad_token_id": 0,
}
VISION = {
    "model_type": "siglip_vision_model",
    "hidden_size": 32,
    "num_hidden_layers": 1,
    "num_attention_heads": 4,
    "intermediate_size": 37,
    "image_size": 16,
    "patch_size": 8,
}


def paligemma():
    text = {**TEXT, "model_type": "gemma", "head_dim": 8}
    config = PaliGemmaConfig(
        text_config=text, vision_config={**VISION, "projection_dim": 32}, image_token_index=98, projection_dim=32
    )
    return PaliGemmaModel(config), {"token_type_ids": torch.zeros(1, 6, dtype=torch.int64)}


def llava_onevision():
    text = {**TEXT, "model_type": "qwen2"}
    config = LlavaOnevisionConfig(text_config=text, vision_config=VISION, image_token_index=97, video_token_index=98)
    return LlavaOnevisionForConditionalGeneration(config), {}


@pytest.mark.parametrize("made", [paligemma, llava_onevision])
@pytest.mark.parametrize("word", ["labels", "logits_to_keep", "shift_labels"])
def test_words_that_models_of_images_pass_to_their_texts(made, word):
    torch.manual_seed(0)
    network, inputs = made()
    ids = torch.randint(3, 90, (1, 6))
    inputs = {"input_ids": ids, **inputs, word: 1 if word == "logits_to_keep" else ids}
    outputs = []
    for implementation in ("eager", install()):
        network.eval().set_attn_implementation(implementation)
        with torch.no_grad():
            result = network(**inputs)
        outputs.append(result.logits if hasattr(result, "logits") else result.last_hidden_state)
    torch.testing.assert_close(outputs[1], outputs[0], atol=1e-5, rtol=1e-5)
