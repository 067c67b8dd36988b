"""The declared rule of each layer of a model, passed by the user or read from the model's configuration."""

from __future__ import annotations

import fnmatch
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from saccade import masks
from saccade.masks import Mask
from saccade.models import DecoderConfig, EncoderConfig
from saccade.support.errors import type_error, value_error

if TYPE_CHECKING:
    from saccade.auditing.by_layer import ByLayer

Declared = Mask | Sequence[Mask] | Mapping[str, Mask | Sequence[Mask]]
"""One rule for all layers, a rule for each layer, or a mapping from patterns of module names ("*.layers.0.*") to rules.

For an encoder-decoder, a mapping from "encoder", "decoder" and "cross" to rules or lists of rules.
"""


def rules_of(declared: Declared, mixers: Sequence[str], layers: int | None) -> list[Mask]:
    """Return the declared rules of a model's layers, first to last.

    Args:
        declared: the rule or rules.
        mixers: names of the modules that mix tokens, in execution order.
        layers: number of layers; when None, the number of mixers.

    Raises:
        TypeError, ValueError: a rule is not a mask, a list has the wrong length, or a module matches no pattern.
    """
    count = layers or len(mixers) or 1
    if isinstance(declared, Mask):
        return [declared] * count
    if isinstance(declared, Mapping):
        found = [_by_pattern(declared, name) for name in mixers]
    else:
        found = list(declared)
        if len(found) != count:
            hint = f"modules that mix tokens: {', '.join(mixers) or 'none found'}"
            raise value_error("rule", f"be one mask for each of {count} layers", f"{len(found)} masks", hint=hint)
    wrong = [type(rule).__name__ for rule in found if not isinstance(rule, Mask)]
    if wrong:
        raise type_error("rule", "be masks", ", ".join(wrong))
    return [rule for rule in found if isinstance(rule, Mask)]


def ruled_modules(declared: Declared, layered: ByLayer, layers: int | None, *, is_encoder_decoder: bool) -> list[str]:
    """Return the names of the modules to which the declared rules apply, in execution order.

    Rules apply to modules that compute attention, and to modules without gradients, because they may compute it. Rules
    apply to all modules that mix tokens if none of them computes attention, if a mapping or a list of equal length
    assigns a rule to each, or if the model is an encoder-decoder.
    """
    names = list(layered.mixed)
    attending = [name for name in names if name in layered.attending or name not in layered.differentiable]
    is_each = isinstance(declared, Sequence) and layers is None and len(declared) == len(names)
    return names if is_encoder_decoder or is_each or isinstance(declared, Mapping) or not attending else attending


def _by_pattern(declared: Mapping[str, Mask | Sequence[Mask]], name: str) -> Mask | Sequence[Mask]:
    for pattern, rule in declared.items():
        if fnmatch.fnmatchcase(name, pattern):
            return rule
    raise value_error("rule", f"have a pattern for the module {name}", list(declared), hint='"*" matches all modules')


def from_config(model: Any) -> list[Mask] | Mask | None:
    """Return the rule that a model's configuration declares; None if the configuration does not determine a rule.

    A window of w in transformers is `Window(w - 1, 0)`; ModernBERT's ``local_attention`` of w is
    ``Window(w // 2, w // 2)``. Recurrent layers are causal. If there are layers of a different type, the result is
    None.
    """
    config = getattr(model, "config", None)
    if isinstance(config, DecoderConfig):
        return config.causal_mask
    if isinstance(config, EncoderConfig):
        return masks.Full()
    if config is None or getattr(config, "is_encoder_decoder", False):
        return None
    text = _text(config)
    if (local := getattr(text, "local_attention", None)) and (every := getattr(text, "global_attn_every_n_layers", 0)):
        near = masks.Window(local // 2, local // 2)
        return [masks.Full() if layer % every == 0 else near for layer in range(text.num_hidden_layers)]
    if is_causal(model):
        return _causal_layers(text)
    return masks.Full() if type(text).__name__ in ("BertConfig", "RobertaConfig") else None


def _causal_layers(text: Any) -> list[Mask] | Mask | None:
    """Return the causal rule of each layer, with its window if the configuration has one; None for unknown layers."""
    width = getattr(text, "sliding_window", None)
    if kinds := getattr(text, "layer_types", None):
        known = {"full_attention": None, "sliding_attention": width, "linear_attention": None}
        return [masks.from_sliding_window(known[kind]) for kind in kinds] if set(kinds) <= known.keys() else None
    if set(getattr(text, "attention_layers", ())) - {"global"}:  # GPT-Neo has windows under a different name
        return None
    return masks.from_sliding_window(width if getattr(text, "use_sliding_window", True) else None)


def _text(config: Any) -> Any:
    """Return the text part of a multimodal model's configuration; return other configurations unchanged."""
    return config.get_text_config() if hasattr(config, "get_text_config") else config


def is_causal(model: Any) -> bool:
    """Return whether a transformers model is a causal language model."""
    text = _text(model.config)
    is_decoder = getattr(text, "is_decoder", None)
    if is_decoder is False and hasattr(text, "add_cross_attention"):  # BERT and similar models can be either
        return False
    if not getattr(text, "causal", True) or getattr(text, "attn_type", "uni") == "bi":  # XLM, XLNet
        return False
    names = [type(model).__name__, *(getattr(model.config, "architectures", None) or ())]
    return bool(is_decoder) or any("CausalLM" in name or name.endswith("LMHeadModel") for name in names)
