"""Small random models of transformers with recurrent layers, and what these multiply before norm and projection."""

import sys
from contextlib import contextmanager

import torch
from torch.nn import functional as F
from transformers import (
    BambaConfig,
    BambaForCausalLM,
    KimiLinearConfig,
    KimiLinearForCausalLM,
    Mamba2Config,
    Mamba2ForCausalLM,
    MiniMaxConfig,
    MiniMaxForCausalLM,
    OlmoHybridConfig,
    OlmoHybridForCausalLM,
    Qwen3_5ForCausalLM,
    Qwen3_5TextConfig,
    Qwen3NextConfig,
    Qwen3NextForCausalLM,
)

WORDS = 50
_COMMON = {
    "vocab_size": WORDS, "hidden_size": 32, "num_hidden_layers": 3, "intermediate_size": 40, "pad_token_id": 0,
    "bos_token_id": 1, "eos_token_id": 2, "num_attention_heads": 4, "num_key_value_heads": 2,
}  # fmt: skip
_TYPES = {"layer_types": ["linear_attention", "full_attention", "linear_attention"]}
_DELTA = {
    "linear_num_key_heads": 2, "linear_num_value_heads": 4, "linear_key_head_dim": 8, "linear_value_head_dim": 12,
}  # fmt: skip
_MAMBA = {f"mamba_{name}": number for name, number in (("n_heads", 8), ("d_head", 8), ("n_groups", 2), ("d_state", 6))}

MODELS = {
    "qwen3_next": (
        Qwen3NextForCausalLM,
        lambda: Qwen3NextConfig(
            **_COMMON, **_TYPES, **_DELTA, head_dim=8, num_experts=4, num_experts_per_tok=2, moe_intermediate_size=16,
            shared_expert_intermediate_size=16,
        ),
    ),
    "qwen3_5": (Qwen3_5ForCausalLM, lambda: Qwen3_5TextConfig(**_COMMON, **_TYPES, **_DELTA, head_dim=8)),
    "olmo_hybrid": (OlmoHybridForCausalLM, lambda: OlmoHybridConfig(**_COMMON, **_TYPES, **_DELTA)),
    "kimi_linear": (
        KimiLinearForCausalLM,
        lambda: KimiLinearConfig(
            **{**_COMMON, "num_key_value_heads": 4}, **_TYPES, linear_head_dim=8, linear_num_heads=4, kv_lora_rank=8,
            qk_rope_head_dim=4, qk_nope_head_dim=8, v_head_dim=8, num_local_experts=4, num_experts_per_tok=2,
            moe_intermediate_size=16, mlp_layer_types=["dense", "sparse", "sparse"],
        ),
    ),
    "mamba2": (
        Mamba2ForCausalLM,
        lambda: Mamba2Config(
            vocab_size=WORDS, hidden_size=32, num_hidden_layers=3, num_heads=8, head_dim=8, state_size=6, n_groups=2,
            chunk_size=8, time_step_limit=[0.02, 5.0], pad_token_id=0, bos_token_id=1, eos_token_id=2,
        ),
    ),
    "bamba": (
        BambaForCausalLM,
        lambda: BambaConfig(**_COMMON, **_MAMBA, attn_layer_indices=[1], mamba_chunk_size=8, mamba_d_conv=4),
    ),
    "minimax": (
        MiniMaxForCausalLM,
        # transformers reads the length of a text from the cache of the first layer, which must be one of attention.
        lambda: MiniMaxConfig(
            **_COMMON, layer_types=["full_attention", *["linear_attention"] * 2], head_dim=8, block_size=4,
            num_local_experts=4,
        ),
    ),
}  # fmt: skip

ALL = tuple(MODELS)
_VALUES = {"torch_chunk_gated_delta_rule": 2, "torch_recurrent_gated_delta_rule": 2} | {
    "chunk_kimi_delta_attention": 2, "recurrent_kimi_delta_attention": 2,
    "mamba2_chunk_scan": 0, "mamba2_selective_state_update": 1,
}  # fmt: skip
"""Functions, and the place of the values among their arguments."""


def model(name, **changes):
    """A model with random weights, whose gates and decays are far from their first values."""
    made, config = MODELS[name]
    config = config()
    for key, value in changes.items():
        setattr(config, key, value)
    generator = torch.Generator().manual_seed(7)
    network = made(config).eval()
    with torch.no_grad():
        for key, parameter in network.named_parameters():
            if key.endswith("A_log"):
                parameter.uniform_(-2.0, 1.0, generator=generator)
            elif parameter.dim() > 1 or key.endswith(("dt_bias", "conv1d.bias", "mixer.D", "mamba.D")):
                parameter.normal_(0.0, 0.3, generator=generator)
    return network


def batch(length=21, padded=3, side="left"):
    """Two texts, the first of them padded."""
    ids = torch.randint(3, WORDS, (2, length), generator=torch.Generator().manual_seed(3))
    attention_mask = torch.ones(2, length, dtype=torch.int64)
    attention_mask[0, slice(padded) if side == "left" else slice(length - padded, None)] = 0
    return {"input_ids": ids, "attention_mask": attention_mask}


def recurrent_layers(network):
    """Names of the recurrent layers, and their modules."""
    ends = ("GatedDeltaNet", "KimiLinearDeltaAttention", "Mamba2Mixer", "BambaMixer", "MiniMaxLightningAttention")
    return {name: one for name, one in network.named_modules() if type(one).__name__.endswith(ends)}


@contextmanager
def cores(network, monkeypatch):
    """For each recurrent layer, what it multiplies in each call, and the product, ``[batch, heads, len, value_dim]``.

    Products are what the layer hands to its norm, less the part that does not go through the state (Mamba-2's D).
    """
    found, running, hooks = {}, [], []
    for name, layer in recurrent_layers(network).items():
        found[name] = []
        norm = next(one for key, one in layer.named_children() if key in ("norm", "o_norm"))
        hooks.append(layer.register_forward_pre_hook(lambda *_, name=name: running.append([name])))
        hooks.append(norm.register_forward_pre_hook(lambda _, args: running[-1].append(args[0].detach().clone())))
        hooks.append(
            layer.register_forward_hook(lambda layer, *_: found[running[-1][0]].append(_pair(layer, running.pop())))
        )
        if hasattr(layer, "qkv_proj"):
            hooks.append(
                layer.qkv_proj.register_forward_hook(lambda _, __, out: running[-1].append(out.detach().clone()))
            )
    for home in {sys.modules[type(one).__module__] for one in recurrent_layers(network).values()}:
        for function in _VALUES.keys() & vars(home).keys():
            monkeypatch.setattr(home, function, _spy(getattr(home, function), _VALUES[function], running))
    try:
        yield found
    finally:
        for hook in hooks:
            hook.remove()
        monkeypatch.undo()


def _spy(function, place, running):
    def spied(*args, **kwargs):
        running[-1].append(args[place].detach().clone())
        return function(*args, **kwargs)

    return spied


def _pair(layer, noted):
    _, value, out = noted
    if hasattr(layer, "qkv_proj"):
        value = F.silu(value).unflatten(2, (layer.num_attention_heads, -1)).chunk(3, -1)[2]
    value = value if value.dim() == 4 else value[:, None]  # a step of Mamba-2
    out = out.reshape(value.shape)
    if hasattr(layer, "D"):
        out = out - layer.D.detach()[:, None] * value
    return value.transpose(1, 2), out.transpose(1, 2)
