"""Qwen3, OLMo 2, Gemma 2 and 3, Cohere 2, Llama 4: read from transformers with equal logits, whole and step by step."""

import json
import re

import pytest
import torch
import transformers as T
from tests.sampled import kept

from saccade import masks
from saccade.models import Decoder, DecoderConfig, LayerPattern
from saccade.nn import QKNorm
from saccade.support.errors import UnsupportedError

SMALL = {
    "vocab_size": 97,
    "hidden_size": 48,
    "intermediate_size": 80,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 64,
    **dict.fromkeys(("pad_token_id", "bos_token_id", "eos_token_id")),
}
WIDE = SMALL | {"head_dim": 16}
GEMMA = WIDE | {"sliding_window": 5, "query_pre_attn_scalar": 20}
YARN = {"rope_type": "yarn", "factor": 4.0, "rope_theta": 1e4}
LONG = {"rope_type": "linear", "factor": 8.0}
EXPERTS = WIDE | {"intermediate_size_mlp": 72, "num_local_experts": 3, "attention_chunk_size": 6, "floor_scale": 4}
LLAMA_4 = EXPERTS | {"no_rope_layer_interval": 3}
CASES = {
    "qwen3": lambda: T.Qwen3Config(**WIDE),
    "qwen3-windows": lambda: T.Qwen3Config(**WIDE, use_sliding_window=True, sliding_window=5, max_window_layers=2),
    "qwen3-biases": lambda: T.Qwen3Config(**WIDE, attention_bias=True, tie_word_embeddings=True),
    "olmo2": lambda: T.Olmo2Config(**SMALL),
    "gemma2": lambda: T.Gemma2Config(**GEMMA),
    "gemma3": lambda: T.Gemma3TextConfig(**GEMMA, sliding_window_pattern=3, rope_scaling=LONG),
    "cohere2": lambda: T.Cohere2Config(**SMALL, sliding_window=5),
    "llama4": lambda: T.Llama4TextConfig(**LLAMA_4, interleave_moe_layer_step=2),
    "llama4-two-of-three": lambda: T.Llama4TextConfig(**LLAMA_4, num_experts_per_tok=2, use_qk_norm=False),
    "llama4-scaled": lambda: T.Llama4TextConfig(
        **LLAMA_4, moe_layers=[3], no_rope_layers=[0, 1, 1, 0], attn_temperature_tuning=False, rope_parameters=YARN
    ),
    "llama-wide-heads": lambda: T.LlamaConfig(**SMALL, head_dim=20),
}


def both(config):
    """A model of transformers with weights that matter everywhere, and ours with the same weights."""
    torch.manual_seed(0)
    theirs = T.AutoModelForCausalLM.from_config(config, attn_implementation="eager").eval()
    with torch.no_grad():
        for name, parameter in theirs.named_parameters():
            is_norm, is_gemma = "norm" in name, "gemma" in config.model_type
            parameter.normal_(1.0 if is_norm and not is_gemma else 0.0, 0.3 if is_norm else 0.15)
    return theirs, Decoder.from_state_dict(config, theirs.state_dict())


@pytest.mark.parametrize("name", CASES)
def test_logits_and_matrices_are_equal(name):
    theirs, ours = both(CASES[name]())
    tokens = torch.randint(97, (2, 23))
    with torch.no_grad():
        expected = theirs(tokens, output_attentions=True)
        torch.testing.assert_close(ours(tokens), expected.logits, atol=2e-5, rtol=1e-5)
    matrices = ours.matrices(tokens)
    assert len(matrices) == len(expected.attentions) == 4
    for matrix, weights in zip(matrices, expected.attentions, strict=True):
        torch.testing.assert_close(matrix.to_dense(), weights, atol=1e-5, rtol=1e-4)


@pytest.mark.parametrize("name", CASES)
def test_prefill_and_steps_are_the_full_run(name):
    _, ours = both(CASES[name]())
    ours.double()
    tokens = torch.randint(97, (2, 19))
    with torch.no_grad():
        whole, cache = ours(tokens), ours.new_cache()
        parts = [ours(part, cache=cache) for part in tokens.split([8, *[1] * 11], 1)]
    torch.testing.assert_close(torch.cat(parts, 1), whole)


@pytest.mark.parametrize("name", CASES)
def test_packed_documents_are_documents_alone(name):
    _, ours = both(CASES[name]())
    ours.double()
    tokens = torch.randint(97, (1, 20))
    with torch.no_grad():
        packed = ours(tokens, mask=masks.Documents([9, 11]))
        alone = torch.cat([ours(part) for part in tokens.split([9, 11], 1)], 1)
    torch.testing.assert_close(packed, alone)


@pytest.mark.parametrize("name", CASES)
def test_a_saved_model_is_read_again(name, tmp_path):
    _, ours = both(CASES[name]())
    ours.save_pretrained(tmp_path)
    again = Decoder.from_pretrained(tmp_path)
    assert again.config == ours.config
    tokens = torch.randint(97, (1, 12))
    assert torch.equal(again(tokens), ours(tokens))


OLD_FILES = {
    "gemma3_text": (
        T.Gemma3TextConfig,
        GEMMA | {"sliding_window_pattern": 2, "rope_theta": 500.0, "rope_local_base_freq": 50.0, "rope_scaling": LONG},
    ),
    "gemma2": (T.Gemma2Config, GEMMA | {"rope_theta": 300.0}),
    "cohere2": (T.Cohere2Config, SMALL | {"sliding_window": 5, "sliding_window_pattern": 2, "rope_theta": 300.0}),
    "qwen3": (T.Qwen3Config, WIDE | {"rope_theta": 300.0, "sliding_window": 4, "use_sliding_window": False}),
    "olmo2": (T.Olmo2Config, SMALL | {"rope_theta": 300.0}),
    "llama4_text": (T.Llama4TextConfig, LLAMA_4 | {"interleave_moe_layer_step": 2, "rope_theta": 300.0}),
}


@pytest.mark.parametrize("kind", OLD_FILES)
def test_older_files_are_read_as_transformers_reads_them(kind):
    make, keys = OLD_FILES[kind]
    theirs, ours = both(make(**keys))
    old = Decoder.from_state_dict({"model_type": kind} | keys, theirs.state_dict())
    assert old.config.layer_patterns == ours.config.layer_patterns
    assert old.config.qk_norm == ours.config.qk_norm
    tokens = torch.randint(97, (1, 20))
    assert torch.equal(old(tokens), ours(tokens))


@pytest.mark.parametrize(
    "change, reason",
    [
        ({"use_bidirectional_attention": True}, "use_bidirectional_attention is true"),
        ({"layer_types": ["chunked_attention"] * 4}, "layer_types names chunked_attention, not only"),
        ({"layer_types": ["full_attention"] * 3}, "layer_types names 3 layers"),
        ({"sliding_window": None}, "sliding_window is missing"),
        ({"hidden_activation": "tanh"}, "hidden_activation is 'tanh'"),
        ({"rope_parameters": {"full_attention": {"rope_type": "dynamic"}}}, "rope_type 'dynamic'"),
        ({"rope_parameters": {"full_attention": 5}}, "rope_parameters is not a JSON object but 5"),
    ],
)
def test_what_we_would_compute_differently_is_refused(change, reason):
    config = {"model_type": "gemma3_text", **GEMMA, "sliding_window_pattern": 2, **change}
    with pytest.raises(UnsupportedError, match=reason):
        Decoder.from_state_dict(config, {})


@pytest.mark.parametrize(
    "change, reason",
    [
        ({"attention_chunk_size": None}, "attention_chunk_size is missing"),
        ({"no_rope_layers": [1, 0]}, "no_rope_layers does not name all layers"),
        ({"layer_types": ["sliding_attention"] * 4}, "layer_types names sliding_attention, not only"),
    ],
)
def test_layers_of_llama_4_that_are_not_described_are_refused(change, reason):
    config = {"model_type": "llama4_text", **LLAMA_4, **change}
    for told in (config, {"model_type": "llama4", "text_config": config}):
        with pytest.raises(UnsupportedError, match=reason):
            Decoder.from_state_dict(told, {})
    with pytest.raises(UnsupportedError, match="text_config is missing"):
        Decoder.from_state_dict({"model_type": "llama4"}, {})


def test_the_text_part_of_a_whole_llama_4_is_read():
    text, ours = both(CASES["llama4"]())
    told = {"model_type": "llama4", "text_config": text.config.to_dict()}
    state = {f"language_model.{name}": x for name, x in text.state_dict().items()}
    whole = Decoder.from_state_dict(told, state | {"vision_model.class_embedding": torch.zeros(3)})
    tokens = torch.randint(97, (1, 20))
    assert whole.config == ours.config
    assert torch.equal(whole(tokens), ours(tokens))


@pytest.mark.ci
@pytest.mark.parametrize("wrong", kept([["x"], {"x": 1}, "x", -1, 1.5, True], ["x"], -1), ids=str)
@pytest.mark.parametrize("name", kept(["qwen3-windows", "gemma3", "cohere2", "llama4"], "gemma3", "llama4"))
def test_whatever_a_value_is_the_answer_is_a_sentence(name, wrong):
    theirs, _ = both(CASES[name]())
    state, told = theirs.state_dict(), theirs.config.to_dict()
    rope = told["rope_parameters"]
    changed = [told | {key: wrong} for key in told]
    changed += [told | {"rope_parameters": rope | {key: wrong}} for key in rope]
    if name == "gemma3":
        full = rope["full_attention"]
        changed += [told | {"rope_parameters": rope | {"full_attention": full | {key: wrong}}} for key in full]
    sentences = []
    for config in changed:
        try:
            Decoder.from_state_dict(config, state)
        except (ValueError, NotImplementedError, TypeError) as error:
            sentences.append(str(error))
    assert len(sentences) > 6
    for sentence in sentences:
        assert re.match(r"[\w.]+: .*( must | cannot run these inputs)", sentence)


CONFIG = {"vocab_size": 9, "max_len": 8, "embed_dim": 12, "num_heads": 2, "num_layers": 3, "feed_forward_dim": 4}


@pytest.mark.parametrize(
    "options, rule",
    [
        ({"layers": ()}, "layers must contain at least one LayerPattern"),
        ({"layers": (LayerPattern(),), "mask": masks.Causal()}, "layers must be None if mask"),
        ({"layers": (LayerPattern(),), "position_encoding": "alibi"}, "layers must be None if mask"),
        ({"layers": (3,)}, "layers must be a LayerPattern or None"),
        ({"parallel": True, "part_norm": True}, "parallel must be False unless"),
        ({"head_dim": 5}, "must be even for rotary positions"),
        ({"qk_norm": "head"}, "qk_norm must be a QKNorm or None"),
        ({"softcap": 0.0}, "softcap must be a finite number above 0"),
    ],
)
def test_wrong_options_are_refused(options, rule):
    with pytest.raises((ValueError, TypeError), match=rule):
        DecoderConfig(**CONFIG | options)


def test_layers_are_repeated():
    config = DecoderConfig(**CONFIG, layers=(LayerPattern(masks.sliding_window(2)), LayerPattern(rotary=False)))
    model = Decoder(config)
    attentions = [layer.attention for layer in model.stack.layers]
    assert [attention.mask for attention in attentions] == [
        masks.sliding_window(2),
        masks.Causal(),
        masks.sliding_window(2),
    ]
    assert [attention.rotary is None for attention in attentions] == [False, True, False]


@pytest.mark.parametrize("wrong", [{"qk_norm": {"kind": 3}}, {"layers": [{"mask": 1}]}, {"layers": 3}, {"qk_norm": 7}])
def test_files_of_ours_with_other_words_are_refused(wrong, tmp_path):
    Decoder(DecoderConfig(**CONFIG, qk_norm=QKNorm())).save_pretrained(tmp_path)
    told = json.loads((tmp_path / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps(told | wrong))
    with pytest.raises(UnsupportedError, match=next(iter(wrong))):
        Decoder.from_pretrained(tmp_path)
