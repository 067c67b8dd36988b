"""How BERT's published folders spell an encoder: the keys of config.json, the names of the weights."""

from collections.abc import Mapping
from typing import Any

from saccade.errors import unsupported, value_error
from saccade.models.activations import ACTIVATIONS
from saccade.models.config import EncoderConfig
from saccade.models.config_types import check_types

__all__ = ["config_from_bert", "encoder_weights", "weight_names"]

_REQUIRED = {
    "vocab_size": "vocab_size",
    "max_position_embeddings": "max_len",
    "hidden_size": "embed_dim",
    "num_attention_heads": "num_heads",
    "num_hidden_layers": "num_layers",
    "intermediate_size": "feed_forward_dim",
}
_OPTIONAL = {
    "type_vocab_size": "num_token_types",
    "hidden_act": "activation",
    "layer_norm_eps": "norm_eps",
    "hidden_dropout_prob": "dropout_p",
    "attention_probs_dropout_prob": "attention_dropout_p",
    "pad_token_id": "pad_token",
}
_EMBEDDING_NAMES = {
    "word_embeddings.weight": "word.weight",
    "position_embeddings.weight": "position.weight",
    "token_type_embeddings.weight": "token_type.weight",
    "LayerNorm.weight": "norm.weight",
    "LayerNorm.bias": "norm.bias",
}
_LAYER_NAMES = {
    "attention.self.query": "attention.query_projection",
    "attention.self.key": "attention.key_projection",
    "attention.self.value": "attention.value_projection",
    "attention.output.dense": "attention.output_projection",
    "attention.output.LayerNorm": "attention_norm",
    "intermediate.dense": "feed_forward.expand",
    "output.dense": "feed_forward.contract",
    "output.LayerNorm": "feed_forward_norm",
}
# What no hidden state depends on: the pooler, a table of 0, 1, 2, ..., and heads of tasks.
_NOT_THE_ENCODER = ("pooler.", "embeddings.position_ids", "cls.", "classifier.", "qa_outputs.")


def config_from_bert(where: str, config: Mapping[str, Any]) -> EncoderConfig:
    """Read the sizes from a BERT ``config.json``.

    Raises:
        UnsupportedError: a model that we would compute differently; every reason is listed.
        ValueError: a size is missing or impossible, or a value is of the wrong type.
    """
    if config.get("model_type", "bert") == "bert":  # of others, types may be other too
        check_types(where, config)
    reasons = _reasons(config)
    if reasons:
        raise unsupported(where, "Encoder", reasons)
    missing = [key for key in _REQUIRED if config.get(key) is None]
    if missing:
        raise value_error(where, "config.json", f"have {', '.join(_REQUIRED)}", f"no {', '.join(missing)}")
    # A key that is there but null means the default, as it does for those who wrote it.
    names = _REQUIRED | _OPTIONAL
    words = {ours: config[key] for key, ours in names.items() if config.get(key) is not None}
    if "activation" in words:
        words["activation"] = ACTIVATIONS[words["activation"]]
    return EncoderConfig(**words)


def weight_names(num_layers: int) -> dict[str, str]:
    """For every weight of an encoder, BERT's name and ours."""
    names = {f"embeddings.{theirs}": f"embeddings.{ours}" for theirs, ours in _EMBEDDING_NAMES.items()}
    for layer in range(num_layers):
        for theirs, ours in _LAYER_NAMES.items():
            for kind in ("weight", "bias"):
                names[f"encoder.layer.{layer}.{theirs}.{kind}"] = f"layers.{layer}.{ours}.{kind}"
    return names


def encoder_weights(published: Mapping[str, Any]) -> dict[str, Any]:
    """Keep what belongs to the encoder, under plain names: no ``bert.`` before, no ``gamma`` and ``beta``."""
    plain = {
        name.removeprefix("bert.")
        .replace("LayerNorm.gamma", "LayerNorm.weight")
        .replace("LayerNorm.beta", "LayerNorm.bias"): weight
        for name, weight in published.items()
    }
    return {name: weight for name, weight in plain.items() if not name.startswith(_NOT_THE_ENCODER)}


def _reasons(config: Mapping[str, Any]) -> list[str]:
    """Why this configuration is none that our encoder computes."""
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
    reasons += [
        f"{key} is true: this is not an encoder" for key in ("is_decoder", "add_cross_attention") if config.get(key)
    ]
    return reasons
