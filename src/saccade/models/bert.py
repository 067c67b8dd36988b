"""How BERT's published folders describe an encoder."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch import Tensor

from saccade.models.checkpoint_format import ACTIVATIONS, FileFormat
from saccade.models.config import EncoderConfig

__all__ = ["Bert"]

_OPTIONAL = {
    "type_vocab_size": "num_token_types",
    "hidden_act": "activation",
    "layer_norm_eps": "norm_eps",
    "hidden_dropout_prob": "dropout_p",
    "attention_probs_dropout_prob": "attention_dropout_p",
    "pad_token_id": "pad_token",
}
# What no hidden state depends on: the pooler, a table of 0, 1, 2, ..., and heads of tasks.
_NOT_THE_ENCODER = ("pooler.", "embeddings.position_ids", "cls.", "classifier.", "qa_outputs.")


class Bert(FileFormat):
    """Learned positions, norms after each sum; Devlin et al. 2019, arXiv:1810.04805."""

    stacks = {"num_layers": ("layers", "encoder.layer")}
    names = {
        "embeddings.word": "embeddings.word_embeddings",
        "embeddings.position": "embeddings.position_embeddings",
        "embeddings.token_type": "embeddings.token_type_embeddings",
        "embeddings.norm": "embeddings.LayerNorm",
        "attention.query_projection": "attention.self.query",
        "attention.key_projection": "attention.self.key",
        "attention.value_projection": "attention.self.value",
        "attention.output_projection": "attention.output.dense",
        "attention_norm": "attention.output.LayerNorm",
        "feed_forward.expand": "intermediate.dense",
        "feed_forward.contract": "output.dense",
        "feed_forward_norm": "output.LayerNorm",
    }

    def reasons_to_read(self, config: Mapping[str, Any]) -> list[str]:
        reasons = []
        kind = config.get("model_type", "bert")
        if kind != "bert":
            reasons.append(f"model_type is {kind!r}, not 'bert'")
        positions = config.get("position_embedding_type") or "absolute"
        if positions != "absolute":
            reasons.append(f"position_embedding_type is {positions!r}, not 'absolute'")
        activation = config.get("hidden_act") or "gelu"
        if not isinstance(activation, str) or activation not in ACTIVATIONS:
            reasons.append(f"hidden_act is {activation!r}, not one of {', '.join(ACTIVATIONS)}")
        decoding = ("is_decoder", "add_cross_attention")
        return reasons + [f"{key} is true: this is not an encoder" for key in decoding if config.get(key)]

    def read_config(self, config: Mapping[str, Any]) -> EncoderConfig:
        words = self._required(config)
        # A key that is there but null means the default, as it does for those who wrote it.
        words |= {ours: config[key] for key, ours in _OPTIONAL.items() if config.get(key) is not None}
        if "activation" in words:
            words["activation"] = ACTIVATIONS[words["activation"]]
        return EncoderConfig(**words)

    def write_config(self, config: EncoderConfig) -> dict[str, Any]:
        """The config.json of an encoder."""
        published = next(name for name, own in ACTIVATIONS.items() if own == config.activation)
        words = {theirs: getattr(config, ours) for theirs, ours in {**self.sizes, **_OPTIONAL}.items()}
        return {"model_type": "bert", "architectures": ["BertModel"], **words, "hidden_act": published}

    def sides(self, config: EncoderConfig) -> tuple[str, ...]:
        return ("vocab_size", "max_len", "num_token_types", "embed_dim", "feed_forward_dim")

    def plain(self, weights: Mapping[str, Tensor], config: EncoderConfig) -> dict[str, Tensor]:
        """Keep what belongs to the encoder, under plain names: no ``bert.`` before, no ``gamma`` and ``beta``."""
        found = {
            name.removeprefix("bert.")
            .replace("LayerNorm.gamma", "LayerNorm.weight")
            .replace("LayerNorm.beta", "LayerNorm.bias"): weight
            for name, weight in weights.items()
        }
        return {name: weight for name, weight in found.items() if not name.startswith(_NOT_THE_ENCODER)}
