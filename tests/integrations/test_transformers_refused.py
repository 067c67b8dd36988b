"""Arguments of transformers that our kernels cannot honour are refused by name."""

import pytest
import torch
from tests.integrations import model_zoo as zoo
from transformers import (
    AttentionInterface,
    GitConfig,
    GitModel,
    GPTBigCodeConfig,
    GPTBigCodeModel,
    InformerConfig,
    InformerModel,
    NemotronConfig,
    NemotronModel,
    OPTConfig,
    OPTModel,
    PatchTSTConfig,
    PatchTSTModel,
    PersimmonConfig,
    PersimmonModel,
    Pix2StructVisionConfig,
    Pix2StructVisionModel,
    PreTrainedModel,
    StableLmConfig,
    StableLmModel,
)
from transformers.masking_utils import create_causal_mask

import saccade as sc
from saccade import masks
from saccade.integrations.lazy_mask import LazyMask
from saccade.integrations.transformers import install
from saccade.integrations.transformers_caches import install_caches


@pytest.fixture(autouse=True)
def _installed():
    install()


class Layer(torch.nn.Module):
    """A stand-in for an attention layer, with the only attribute that the function reads."""

    is_causal = True


@pytest.mark.parametrize(
    "facts, reason",
    [
        ({"output_attentions": True}, "output_attentions=True needs all weights.*\n.*saccade.record"),
        ({"cu_seq_lens_q": torch.tensor([0, 3, 5])}, "passes cu_seq_lens_q.*\n.*position_ids"),
        ({"block_table": torch.tensor([0])}, "passes block_table, which is not supported"),
    ],
)
def test_unsupported_settings_raise(facts, reason):
    x = torch.randn(1, 2, 5, 8)
    function = AttentionInterface()["saccade"]
    with pytest.raises(sc.UnsupportedError, match=reason):
        function(Layer(), x, x, x, None, **facts)


IDS = {"input_ids": torch.arange(3, 14)[None]}
SMALL = {
    "vocab_size": 50,
    "hidden_size": 32,
    "num_attention_heads": 4,
    "num_key_value_heads": 4,
    "num_hidden_layers": 2,
    "intermediate_size": 40,
}
# Some hand the flag on, some collect weights by hooks and tell no layer, and some collect them on their way.
ASKED = {
    **{name: lambda name=name: (zoo.model(name), zoo.batch(name)) for name in zoo.ALL},
    "opt": lambda: (OPTModel(OPTConfig(**SMALL, ffn_dim=40, word_embed_proj_dim=32)), IDS),
    "gpt_bigcode": lambda: (GPTBigCodeModel(GPTBigCodeConfig(vocab_size=50, n_embd=32, n_head=4, n_layer=2)), IDS),
    "stablelm": lambda: (StableLmModel(StableLmConfig(**SMALL)), IDS),
    "nemotron": lambda: (NemotronModel(NemotronConfig(**SMALL, head_dim=8)), IDS),
    "persimmon": lambda: (PersimmonModel(PersimmonConfig(**SMALL)), IDS),
    "patchtst": lambda: (
        PatchTSTModel(PatchTSTConfig(d_model=32, num_attention_heads=4, num_hidden_layers=2, ffn_dim=40)),
        {"past_values": torch.randn(2, 32, 1)},
    ),
    "pix2struct": lambda: (
        Pix2StructVisionModel(Pix2StructVisionConfig(hidden_size=32, d_kv=8, num_attention_heads=4, d_ff=40,
                                                     num_hidden_layers=2, patch_embed_hidden_size=12)),
        {"flattened_patches": torch.ones(2, 9, 14)},
    ),
}  # fmt: skip


@pytest.mark.parametrize("installed", [install, install_caches])
@pytest.mark.parametrize("said", ["in the call", "in the configuration"])
@pytest.mark.parametrize("name", ASKED)
def test_weights_are_refused_whichever_way_a_model_asks_for_them(name, said, installed):
    network, inputs = ASKED[name]()
    network.eval().set_attn_implementation(installed())
    with torch.no_grad():
        network(**inputs)
        network(**inputs, output_attentions=False)
    asked = {"output_attentions": True} if said == "in the call" else {}
    if not asked:
        network.set_attn_implementation("eager")
        for part in network.modules():  # T5's halves have configurations of their own
            if isinstance(part, PreTrainedModel):
                part.config.output_attentions = True
        network.set_attn_implementation(installed())
    refused = pytest.raises(sc.UnsupportedError, match=r"output_attentions=True needs all(.|\n)*saccade.record")
    with torch.no_grad(), refused:
        network(**inputs, **asked)


def test_a_users_variable_of_the_same_name_asks_for_nothing():
    output_attentions = True
    layer, x = Layer(), torch.randn(1, 2, 5, 8)
    out, weights = AttentionInterface()["saccade"](layer, x, x, x, None)
    assert output_attentions
    assert weights is None
    assert out.shape == (1, 5, 2, 8)


def test_a_mask_of_integers_raises():
    model, ids = zoo.model("llama", "saccade"), torch.randint(3, zoo.WORDS, (2, 6))
    mask = torch.ones(2, 1, 6, 6, dtype=torch.int64).tril()
    inputs = {"input_ids": ids, "attention_mask": mask, "use_cache": False}
    reason = r"attn_mask must be bool or float; got torch\.int64\.\nHint: mask\.bool\(\)"
    with pytest.raises(TypeError, match=reason):
        model(**inputs)
    with pytest.raises(TypeError, match=reason):
        torch.export.export(model, (), inputs, strict=False)


def test_a_mask_for_other_lengths_raises():
    network = zoo.model("llama", "saccade")
    mask = create_causal_mask(network.config, torch.zeros(1, 5, 32), None, past_key_values=None)
    assert isinstance(mask, LazyMask)
    x = torch.randn(1, 4, 6, 8)
    with pytest.raises(sc.UnsupportedError, match=r"made for \[5, 5\], but the call has \[6, 6\]"):
        AttentionInterface()["saccade"](Layer(), x, x, x, mask)


def test_one_mask_for_a_model_with_cross_attention_raises():
    network = zoo.model("bart", install("saccade-own", mask=masks.Window(1, 1)))
    with pytest.raises(sc.UnsupportedError, match=r"has cross-attention(.|\n)*install\(mask=function\)"):
        network(**zoo.batch("bart"))


def informer():
    return InformerModel(InformerConfig(prediction_length=5, context_length=8, lags_sequence=[1], d_model=16,
        encoder_layers=1, decoder_layers=1, encoder_attention_heads=2, decoder_attention_heads=2, encoder_ffn_dim=16,
        decoder_ffn_dim=16, num_time_features=1))  # fmt: skip


def git():
    sizes = {"hidden_size": 32, "num_hidden_layers": 1, "num_attention_heads": 4, "intermediate_size": 37}
    vision = {**sizes, "image_size": 32, "patch_size": 16}
    special = {"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2}
    return GitModel(GitConfig(vision_config=vision, vocab_size=99, max_position_embeddings=64, **sizes, **special))


def informer_inputs():
    torch.manual_seed(0)
    shapes = {"past_values": (2, 9), "past_time_features": (2, 9, 1), "future_time_features": (2, 5, 1)}
    values = {name: torch.randn(shape) for name, shape in shapes.items()}
    return values | {"past_observed_mask": torch.ones(2, 9), "future_values": torch.randn(2, 5)}


OWN_SOFTMAX = {
    "git": (git, lambda: {"input_ids": torch.randint(3, 99, (2, 7))}),
    "informer": (informer, informer_inputs),
}


@pytest.mark.parametrize("name", OWN_SOFTMAX)
def test_models_with_a_softmax_of_their_own_run_it_call_by_call(name):
    made, inputs_of = OWN_SOFTMAX[name]
    network, inputs = made().eval(), inputs_of()
    before = network.config._attn_implementation
    expected = network(**inputs).last_hidden_state
    replaced = sc.replace_attention(network, partial=True)
    torch.testing.assert_close(network(**inputs).last_hidden_state, expected)
    assert network.config._attn_implementation == before
    assert {one.how for one in replaced} >= {"calls"}


@pytest.mark.parametrize("name", ["", "eager", "my-sdpa", "saccade/flash", "a|b", "flex_attention"])
def test_names_that_mean_something_to_transformers(name):
    with pytest.raises(ValueError, match="install: name must be a new name without sdpa, flash"):
        install(name)


@pytest.mark.parametrize("mask", [3, "causal", torch.ones(3, 3, dtype=torch.bool), masks.Causal])
def test_an_argument_that_is_no_mask_is_refused(mask):
    with pytest.raises(TypeError, match="install: mask must be a saccade mask, a function of the attention module"):
        install(mask=mask)


def test_a_function_that_gives_no_mask():
    network = zoo.model("llama", install("saccade-own", mask=lambda layer: "near"))
    with pytest.raises(TypeError, match="install: mask must return a saccade mask or None; got str"):
        network(**zoo.batch("llama"))


def test_a_name_that_is_no_text():
    with pytest.raises(TypeError, match="install: name must be a str; got int"):
        install(3)
