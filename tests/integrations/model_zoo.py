"""Small random models of transformers, one for each argument that its attention functions receive."""

import torch
from transformers import (
    BartConfig,
    BartModel,
    BertConfig,
    BertModel,
    Gemma2Config,
    Gemma2ForCausalLM,
    GPT2Config,
    GPT2LMHeadModel,
    GptOssConfig,
    GptOssForCausalLM,
    LlamaConfig,
    LlamaForCausalLM,
    MistralConfig,
    MistralForCausalLM,
    T5Config,
    T5Model,
)

WORDS = 50
_SPECIAL = {"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2}
_COMMON = {
    "vocab_size": WORDS,
    "hidden_size": 32,
    "num_attention_heads": 4,
    "num_hidden_layers": 2,
    "intermediate_size": 40,
    **_SPECIAL,
}
_GROUPED = {**_COMMON, "num_key_value_heads": 2}
_NEAR = {**_GROUPED, "sliding_window": 4, "head_dim": 8}
_PAIR = {"vocab_size": WORDS, "d_model": 32, **_SPECIAL, "decoder_start_token_id": 1}
_BART = {f"{side}_{name}": number for side in ("encoder", "decoder") for name, number in (
    ("layers", 2), ("attention_heads", 4), ("ffn_dim", 40),
)}  # fmt: skip

CAUSAL = ("llama", "mistral", "gemma2", "gpt_oss", "gpt2")
PAIRED = ("bart", "t5")
ALL = (*CAUSAL, "bert", *PAIRED)


def configured(name):
    """Return the class of a model and its configuration."""
    return {
        "llama": lambda: (LlamaForCausalLM, LlamaConfig(**_GROUPED)),
        "mistral": lambda: (MistralForCausalLM, MistralConfig(**_NEAR)),
        "gemma2": lambda: (
            Gemma2ForCausalLM,
            Gemma2Config(**_NEAR, query_pre_attn_scalar=16, attn_logit_softcapping=2.0),
        ),
        "gpt_oss": lambda: (GptOssForCausalLM, GptOssConfig(**_NEAR, num_local_experts=4)),
        "gpt2": lambda: (
            GPT2LMHeadModel,
            GPT2Config(
                vocab_size=WORDS, n_embd=32, n_head=4, n_layer=2, scale_attn_by_inverse_layer_idx=True, **_SPECIAL
            ),
        ),
        "bert": lambda: (BertModel, BertConfig(**_COMMON)),
        "bart": lambda: (BartModel, BartConfig(**_PAIR, **_BART)),
        "t5": lambda: (T5Model, T5Config(**_PAIR, d_kv=8, num_heads=4, num_layers=2, d_ff=40)),
    }[name]()


def model(name, implementation="eager", **changes):
    """Return a model with random weights, large enough that attention is far from uniform."""
    made, config = configured(name)
    for key, value in changes.items():
        setattr(config, key, value)
    config._attn_implementation = implementation
    generator = torch.Generator().manual_seed(7)
    network = made(config).eval()
    with torch.no_grad():
        for parameter in network.parameters():
            if parameter.dim() > 1 or parameter.numel() == config.num_attention_heads:
                parameter.normal_(0.0, 0.2, generator=generator)
    return network


def batch(name, length=11, padded=3):
    """Return two texts, the first padded on the left; an encoder-decoder also gets a shorter text to continue."""
    generator = torch.Generator().manual_seed(3)
    ids = torch.randint(3, WORDS, (2, length), generator=generator)
    attention_mask = torch.ones(2, length, dtype=torch.int64)
    attention_mask[0, :padded] = 0
    inputs = {"input_ids": ids, "attention_mask": attention_mask}
    return {**inputs, "decoder_input_ids": ids[:, :7]} if name in PAIRED else inputs


def output(name, result, padded=3):
    """Return the outputs of a model at real tokens, as one tensor."""
    tensor = result.logits if hasattr(result, "logits") else result.last_hidden_state
    return tensor if name in PAIRED else torch.cat([tensor[0, padded:], tensor[1]])
