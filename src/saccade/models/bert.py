"""The format of BERT's published folders."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch import Tensor

from saccade.models.checkpoint_format import ACTIVATIONS, FileFormat
from saccade.models.config import EncoderConfig

_OPTIONAL = {
    "type_vocab_size": "num_token_types",
    "hidden_act": "activation",
    "layer_norm_eps": "norm_eps",
    "hidden_dropout_prob": "dropout_p",
    "attention_probs_dropout_prob": "attention_dropout_p",
    "pad_token_id": "pad_token",
}
# No hidden state depends on the pooler, the table of 0, 1, 2, ... or the heads of tasks.
_UNUSED_WEIGHTS = ("pooler.", "embeddings.position_ids", "cls.", "classifier.", "qa_outputs.")


class Bert(FileFormat):
    """Learned positions, norms after each sum; Devlin et al. 2019, arXiv:1810.04805."""

    activation = "gelu"
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
        positions = config.get("position_embedding_type") or "absolute"
        if positions != "absolute":
            reasons.append(f"position_embedding_type is {positions!r}, not 'absolute'")
        reasons += self._activation_reasons(config)
        decoding = ("is_decoder", "add_cross_attention")
        return reasons + [f"{key} is true: this is not an encoder" for key in decoding if config.get(key)]

    def read_config(self, config: Mapping[str, Any], weights: Mapping[str, Tensor]) -> EncoderConfig:
        fields = self._required(config)
        # A null value means the default, as in transformers.
        fields |= {ours: config[key] for key, ours in _OPTIONAL.items() if config.get(key) is not None}
        if "activation" in fields:
            fields["activation"] = ACTIVATIONS[fields["activation"]]
        return EncoderConfig(**fields)

    def write_config(self, config: EncoderConfig) -> dict[str, Any]:
        activation = next(name for name, ours in ACTIVATIONS.items() if ours == config.activation)
        fields = {theirs: getattr(config, ours) for theirs, ours in {**self.sizes, **_OPTIONAL}.items()}
        return {"model_type": "bert", "architectures": ["BertModel"], **fields, "hidden_act": activation}

    def sides(self, config: EncoderConfig) -> tuple[str, ...]:
        return ("vocab_size", "max_len", "num_token_types", "embed_dim", "feed_forward_dim")

    def clean_weights(self, weights: Mapping[str, Tensor], config: EncoderConfig) -> dict[str, Tensor]:
        """Return the encoder's weights without the prefix ``bert.``, and named weight and bias, not gamma and beta."""
        renamed = {
            name.removeprefix("bert.")
            .replace("LayerNorm.gamma", "LayerNorm.weight")
            .replace("LayerNorm.beta", "LayerNorm.bias"): weight
            for name, weight in weights.items()
        }
        return {name: weight for name, weight in renamed.items() if not name.startswith(_UNUSED_WEIGHTS)}
