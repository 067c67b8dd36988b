"""The language models of the installed transformers, each with small sizes and random weights."""

from __future__ import annotations

import dataclasses
import re
import tomllib
from functools import cache
from importlib import resources
from typing import Any, Literal

import torch
from torch import nn

from saccade.integrations.transformers import install

Kind = Literal["causal", "masked"]


@dataclasses.dataclass(frozen=True)
class Architecture:
    """A class of transformers that reads text.

    Attributes:
        name: the type of its configuration, such as "gpt2".
        model: the name of its class.
        kind: "causal" or "masked" language model.
    """

    name: str
    model: str
    kind: Kind

    @property
    def key(self) -> str:
        """Its name, distinct from the other kind with the same name."""
        return self.name if self.kind == "causal" else f"{self.name} (masked)"

    def expression(self) -> str:
        """Return a Python expression that makes the model, with transformers as ``T``."""
        config = self._class().config_class
        sizes = small_sizes(config)
        if self.kind == "causal" and hasattr(config(), "is_decoder"):
            sizes["is_decoder"] = True
        arguments = ", ".join(f"{name}={value!r}" for name, value in sizes.items())
        return f"T.{self.model}(T.{config.__name__}({arguments}))"

    def make(self, implementation: str, seed: int = 0) -> nn.Module:
        """Make the model in evaluation mode, with this attention implementation.

        Raises:
            ValueError: it has no such implementation. Models without a choice, such as recurrences, run as "eager".
        """
        import transformers  # noqa: PLC0415  # an extra

        torch.manual_seed(seed)
        model = eval(self.expression(), {"T": transformers}).eval()  # the text on the page
        for name, own in model.named_parameters():  # initial weights for training are small, and would hide leaks
            if own.dim() > 1 and own.requires_grad and "embed" not in name:  # the padding row stays 0
                nn.init.xavier_normal_(own)
        if implementation == "saccade":
            install()
        if implementation != "eager":
            model.set_attn_implementation(implementation)
            if model.config._attn_implementation != implementation:
                raise ValueError("its implementation of attention cannot be changed")
        elif model.config._attn_implementation != "eager":
            model.set_attn_implementation("eager")
        return model

    def _class(self) -> Any:
        import transformers  # noqa: PLC0415  # an extra

        return getattr(transformers, self.model)


def architectures() -> list[Architecture]:
    """Return every class that transformers lists as a causal or masked language model and that reads one text."""
    from transformers.models.auto import configuration_auto  # noqa: PLC0415
    from transformers.models.auto import modeling_auto as auto  # noqa: PLC0415  # an extra

    configs: dict[str, str] = vars(configuration_auto)["CONFIG_MAPPING_NAMES"]
    listed: list[tuple[Kind, Any]] = [
        ("causal", auto.MODEL_FOR_CAUSAL_LM_MAPPING_NAMES),
        ("masked", auto.MODEL_FOR_MASKED_LM_MAPPING_NAMES),
    ]
    found: dict[tuple[str, Kind], Architecture] = {}
    for kind, names in listed:
        for name, model in names.items():
            first = model if isinstance(model, str) else model[0]
            if "ConditionalGeneration" in first:  # reads images, audio, or a second text
                continue
            is_its_own = first.startswith(configs[name].removesuffix("Config"))
            if is_its_own or (first, kind) not in found:
                found[first, kind] = Architecture(name, first, kind)
    return sorted(found.values(), key=lambda one: one.key)


VOCABULARY = 101
"""The size of every small model's vocabulary."""

# The first pattern that matches a whole name gives its size. Names without a match keep their default.
_SIZES: tuple[tuple[str, int], ...] = (
    (r"(\w*_)?vocab_size|n_vocab", VOCABULARY),
    (r"pad_token_id", 0),
    (r"bos_token_id", 1),
    (r"(eos|sep)_token_id", 2),
    (r"(unk|mask|cls|image|video|audio)_token_(id|index)", 3),
    (r"max_position_embeddings|n_positions|n_ctx|max_seq(uence)?_len(gth)?|context_length", 128),
    (r"(num|n|(encoder|decoder)(_num)?)(_hidden|_encoder|_decoder)?_layers?|(encoder|decoder)_layers|depth", 2),
    (r"num_(key_value|kv)_(heads|groups)|n_head_kv|multi_query_group_num|linear_num_key_heads", 2),
    (r"(linear|mamba|gdn|kda)_(num|n)_(key|value|v|k)?_?heads", 4),
    (r"(num_|n_|(encoder|decoder)_)?(attention_)?heads?", 4),
    (r"((global|attention|attn|kv|swa)_)?head_(dim|size)|linear_(key|value)_head_dim|kv_channels|d_kv", 16),
    (r"v_head_dim|qk_(rope|nope)_head_dim", 16),
    (r"(q|o|kv)_lora_rank", 32),
    (r"(\w*_)?(intermediate|ffn_hidden|ffn|feed_forward|mlp)_(size|dim)|d_ff|d_inner|n_inner|inner_dim", 96),
    (r"hidden_(size|dim)|(word_)?embed(ding)?_(proj_)?(size|dim)|d_model|n_embd|d_embed|(emb_|model_)?dim", 64),
    (r"(num_|n_)?(local_|routed_|moe_)?(num_)?experts|moe_num_experts", 4),
    (r"(num|n)_shared_experts|(topk|n)_group|num_expert_groups?|first_k_dense_replace", 1),
    (r"(num_)?experts_per_tok(en)?|top_k|moe_k|(router|moe)_top_?k|num_(selected_experts|experts_per_token)", 2),
    (r"(global_attention_)?(sliding|attention|local)_(window|attention)(_size)?|window_size", 8),
    (r"(mamba_)?chunk_size|mamba_d_state|(ssm_)?state_size|mamba_state_dim", 8),
    (r"(mamba_)?dt_rank|time_step_rank", 8),
)


def small_sizes(config_class: Any) -> dict[str, Any]:
    """Return arguments of a configuration: small sizes instead of its defaults, and a layer of each of its kinds.

    Exceptions of single architectures are in small.toml.
    """
    return _shrunk(config_class()) | _exceptions().get(config_class.model_type, {})


def _shrunk(defaults: Any) -> dict[str, Any]:
    sizes: dict[str, Any] = {}
    for name, value in defaults.to_dict().items():
        if name in getattr(defaults, "sub_configs", {}):
            if (inner := getattr(defaults, name)) is not None:
                sizes[name] = _shrunk(inner)
        elif type(value) is int or (value is None and "token" in name):
            size = next((size for pattern, size in _SIZES if re.fullmatch(pattern, name)), None)
            sizes |= {} if size is None else {name: size}
    if "kv_lora_rank" in sizes and "num_key_value_heads" in sizes:  # multi-head latent attention has no groups
        sizes["num_key_value_heads"] = sizes["num_attention_heads"]
    if "layer_types" in vars(defaults) and (kinds := defaults.layer_types):  # some configurations have a property
        kinds = list(dict.fromkeys(kinds))
        sizes["layer_types"] = kinds * 2 if len(kinds) == 1 else kinds
        sizes |= {
            name: len(sizes["layer_types"]) for name in ("num_hidden_layers", "n_layers", "n_layer") if name in sizes
        }
    return sizes


@cache
def _exceptions() -> dict[str, dict[str, Any]]:
    return tomllib.loads(resources.files(__package__).joinpath("small.toml").read_text("utf-8"))
