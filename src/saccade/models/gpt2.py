"""How GPT-2's published folders spell a decoder."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from torch import Tensor

from saccade.models.activations import ACTIVATIONS, published_name
from saccade.models.decoder_config import DecoderConfig
from saccade.models.form import Form, end_tokens_of, required, without_tied_head
from saccade.models.weights import Entry

__all__ = ["GPT2"]

_REQUIRED = {
    "vocab_size": "vocab_size",
    "n_positions": "max_len",
    "n_embd": "embed_dim",
    "n_head": "num_heads",
    "n_layer": "num_layers",
}
_PROJECTIONS = ("query_projection", "key_projection", "value_projection")
# name there, names here, whether it is turned on its side there (its linear layers are written as convolutions)
_LAYER = (
    ("ln_1", ("attention_norm",), False),
    ("attn.c_attn", tuple(f"attention.{name}" for name in _PROJECTIONS), True),
    ("attn.c_proj", ("attention.output_projection",), True),
    ("ln_2", ("feed_forward_norm",), False),
    ("mlp.c_fc", ("feed_forward.expand",), True),
    ("mlp.c_proj", ("feed_forward.contract",), True),
)
_MASKS = (".attn.bias", ".attn.masked_bias")  # constants that older files carry


class GPT2(Form):
    """Learned positions, layer norms first, one gelu layer, one joined projection; Radford et al. 2019."""

    def reasons_to_read(self, config: Mapping[str, Any]) -> list[str]:
        reasons = []
        activation = config.get("activation_function") or "gelu_new"
        if activation not in ACTIVATIONS:
            reasons.append(f"activation_function is {activation!r}, not one of {', '.join(ACTIVATIONS)}")
        if config.get("scale_attn_weights", True) is not True:
            reasons.append("scale_attn_weights is not true: scores are always scaled here")
        reasons += [
            f"{key} is true, which we do not compute"
            for key in ("scale_attn_by_inverse_layer_idx", "add_cross_attention")
            if config.get(key)
        ]
        dropouts = {key: config.get(key, 0.1) for key in ("resid_pdrop", "embd_pdrop")}
        if len(set(dropouts.values())) > 1:
            reasons.append(f"{dropouts} differ: embeddings and what is added to them are dropped alike here")
        return reasons

    def read_config(self, where: str, config: Mapping[str, Any]) -> DecoderConfig:
        sizes = required(where, config, _REQUIRED)
        inner = config.get("n_inner")
        dropouts = [config.get(key, 0.1) for key in ("resid_pdrop", "attn_pdrop")]
        return DecoderConfig(
            **sizes,
            feed_forward_dim=4 * sizes["embed_dim"] if inner is None else inner,
            position_encoding="learned",
            activation=ACTIVATIONS[config.get("activation_function") or "gelu_new"],
            gated=False,
            norm="layer",
            norm_eps=config.get("layer_norm_epsilon", 1e-5),
            attention_bias=True,
            feed_forward_bias=True,
            tied=config.get("tie_word_embeddings", True),
            dropout_p=dropouts[0],
            attention_dropout_p=dropouts[1],
            end_tokens=end_tokens_of(config),
        )

    def reasons_to_write(self, config: DecoderConfig) -> list[str]:
        wanted = {
            "position_encoding": "learned",
            "norm": "layer",
            "gated": False,
            "attention_bias": True,
            "feed_forward_bias": True,
            "mask": None,
            "kv_heads": config.num_heads,
        }
        return [
            f"{name} is {getattr(config, name)}, not {own}"
            for name, own in wanted.items()
            if getattr(config, name) != own
        ]

    def write_config(self, config: DecoderConfig) -> dict[str, Any]:
        words = {key: getattr(config, ours) for key, ours in _REQUIRED.items()}
        return {
            "model_type": "gpt2",
            "architectures": ["GPT2LMHeadModel"],
            **words,
            "n_inner": config.feed_forward_dim,
            "activation_function": published_name(config.activation, gelu_tanh="gelu_new"),
            "layer_norm_epsilon": config.norm_eps,
            "resid_pdrop": config.dropout_p,
            "embd_pdrop": config.dropout_p,
            "attn_pdrop": config.attention_dropout_p,
            "tie_word_embeddings": config.tied,
            "bos_token_id": None,
            "eos_token_id": list(config.end_tokens) or None,
        }

    def entries(self, config: DecoderConfig, own: Iterable[str]) -> list[Entry]:
        del own
        found = [
            Entry("transformer.wte.weight", ("embedding.weight",)),
            Entry("transformer.wpe.weight", ("position.weight",)),
        ]
        for layer in range(config.num_layers):
            for name, parts, transposed in _LAYER:
                for kind in ("weight", "bias"):
                    ours = tuple(f"stack.layers.{layer}.{part}.{kind}" for part in parts)
                    is_turned = transposed and kind == "weight"
                    found.append(Entry(f"transformer.h.{layer}.{name}.{kind}", ours, is_turned))
        found += [Entry(f"transformer.ln_f.{kind}", (f"stack.final_norm.{kind}",)) for kind in ("weight", "bias")]
        if not config.tied:
            found.append(Entry("lm_head.weight", ("head.weight",)))
        return found

    def plain(self, where: str, weights: Mapping[str, Tensor], config: DecoderConfig) -> dict[str, Tensor]:
        found = {
            name if name.startswith(("transformer.", "lm_head.")) else f"transformer.{name}": weight
            for name, weight in weights.items()
            if not name.endswith(_MASKS)
        }
        return without_tied_head(where, found, "lm_head.weight", "transformer.wte.weight") if config.tied else found
