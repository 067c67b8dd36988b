"""Small random models, right and published, and what is asked of them."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from saccade.auditing.equivalence import Pair
from saccade.models import Decoder, DecoderConfig, Encoder, EncoderConfig

SIZES: dict[str, Any] = {"vocab_size": 101, "hidden_size": 64, "num_hidden_layers": 2, "pad_token_id": 0}
HEADS: dict[str, Any] = {**SIZES, "num_attention_heads": 4, "intermediate_size": 96}
GROUPED: dict[str, Any] = {**HEADS, "num_key_value_heads": 2}
OWN: dict[str, Any] = {"vocab_size": 101, "max_len": 64, "embed_dim": 64, "num_heads": 4, "num_layers": 2}
DECODER: dict[str, Any] = {
    **OWN,
    "num_kv_heads": 2,
    "feed_forward_dim": 96,
    "dropout_p": 0.1,
    "attention_dropout_p": 0.1,
}
EVERYTHING: dict[str, Any] = {"packed": [9, 8, 6], "padded": True, "cache": True}
ONES, FOUR = "packed, with a mask of ones", "packed, with a mask of four dimensions"
LEAKY = {ONES, "packed, with a cache"}  # beside which transformers looks for no texts
BESIDE = LEAKY | {FOUR}
STEPS = ("one token first", "one token last", "two halves", "one by one", "pieces of 5")
STEP_NAMES = {f"steps: {name}" for name in STEPS}
CACHE = STEP_NAMES | {"cache cropped", "cache forked", "cache reordered"}
NO_CACHE = CACHE | {"positions shifted"}


def tokens(batch: int = 2, n: int = 23) -> Tensor:
    return torch.randint(3, 101, (batch, n), generator=torch.Generator().manual_seed(3))


def named(pairs: list[Pair], verdict: str) -> set[str]:
    return {pair.name for pair in pairs if pair.verdict == verdict}


def of(name: str) -> Callable[..., nn.Module]:
    """A model of transformers by the names of its class and of its config's."""

    def make(config: str, **sizes: Any) -> nn.Module:
        transformers = pytest.importorskip("transformers")
        transformers.logging.set_verbosity_error()
        return getattr(transformers, name)(getattr(transformers, config)(**sizes)).eval()

    return make


def llama(**more: Any) -> nn.Module:
    return of("LlamaForCausalLM")("LlamaConfig", **GROUPED, **more)


def gpt2() -> nn.Module:
    return of("GPT2LMHeadModel")("GPT2Config", vocab_size=101, n_embd=64, n_layer=2, n_head=4)


def mistral() -> nn.Module:
    return of("MistralForCausalLM")("MistralConfig", **GROUPED, sliding_window=8)


def gemma3() -> nn.Module:
    layers = ["sliding_attention", "full_attention"]
    sizes = {**GROUPED, "head_dim": 16, "sliding_window": 8, "layer_types": layers}
    return of("Gemma3ForCausalLM")("Gemma3TextConfig", **sizes)


def bert() -> nn.Module:
    return of("BertModel")("BertConfig", **HEADS)


def gpt_oss() -> nn.Module:
    sizes = {**GROUPED, "head_dim": 16, "num_local_experts": 4, "num_experts_per_tok": 2}
    return of("GptOssForCausalLM")("GptOssConfig", **sizes)


def opt() -> nn.Module:
    sizes = {**SIZES, "num_attention_heads": 4, "ffn_dim": 96, "word_embed_proj_dim": 64}
    return of("OPTForCausalLM")("OPTConfig", **sizes)


def falcon() -> nn.Module:
    sizes = {"vocab_size": 101, "hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4}
    return of("FalconForCausalLM")("FalconConfig", **sizes)


def rows(out: Any) -> Tensor:
    """Logits or hidden states of what a model of transformers returns."""
    return out.logits if hasattr(out, "logits") else out.last_hidden_state


def falcon_mamba() -> nn.Module:
    return of("FalconMambaForCausalLM")("FalconMambaConfig", **SIZES)


def decoder(**more: Any) -> nn.Module:
    return Decoder(DecoderConfig(**DECODER, **more))


def encoder() -> nn.Module:
    return Encoder(EncoderConfig(**OWN, feed_forward_dim=96))
