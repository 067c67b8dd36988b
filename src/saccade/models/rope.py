"""Rotary positions as config.json spells them."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

from saccade.positions import Linear, Llama3, Scaling, YaRN

__all__ = ["rope_reasons", "rope_base", "rope_scaling", "rope_words"]

_YARN = ("beta_fast", "beta_slow", "attention_factor", "mscale", "mscale_all_dim", "truncate")
_LLAMA3 = ("low_freq_factor", "high_freq_factor")
_TRAINED = "original_max_position_embeddings"
_KEYS: dict[str, tuple[tuple[str, ...], tuple[str, ...]]] = {  # what each type must have, and may have
    "default": ((), ()),
    "linear": (("factor",), ()),
    "llama3": (("factor", *_LLAMA3, _TRAINED), ()),
    "yarn": (("factor",), (*_YARN, _TRAINED)),
}


def rope_reasons(config: Mapping[str, Any]) -> list[str]:
    """Why we would turn by other angles than those who wrote this; empty: we would not."""
    told = _told(config)
    if not isinstance(told, Mapping):
        return [f"rope_parameters is no JSON object but {told!r}"]
    kind = _kind(told)
    if kind == "dynamic":
        reason = "rope_type 'dynamic' turns by angles that change with the length, so that no cache equals the full run"
        return [reason]
    if kind not in _KEYS:
        return [f"rope_type is {kind!r}, not one of {', '.join(_KEYS)}"]
    needed, allowed = _KEYS[kind]
    missing = [key for key in needed if told.get(key) is None]
    reasons = [f"rope_type {kind!r} lacks {', '.join(missing)}"] if missing else []
    if told.get("partial_rotary_factor", 1.0) != 1.0:
        reasons.append(f"partial_rotary_factor is {told['partial_rotary_factor']}, not 1")
    known = {*needed, *allowed, "rope_type", "type", "rope_theta", "partial_rotary_factor"}
    unknown = [key for key, own in told.items() if key not in known and own is not None and kind != "default"]
    if unknown:
        reasons.append(f"rope_type {kind!r} has {', '.join(unknown)}, which we do not know")
    return reasons


def rope_base(config: Mapping[str, Any]) -> float:
    """The base of the frequencies."""
    told = _told(config)
    base = told.get("rope_theta")
    base = config.get("rope_theta") if base is None else base
    return 10000.0 if base is None else base


def rope_scaling(config: Mapping[str, Any]) -> Scaling | None:
    """What changes the frequencies; None where nothing does."""
    told = _told(config)
    kind = _kind(told)
    if kind == "linear":
        return Linear(told["factor"])
    if kind == "llama3":
        return Llama3(told["factor"], told["low_freq_factor"], told["high_freq_factor"], told[_TRAINED])
    if kind == "yarn":
        trained = told.get(_TRAINED)
        return YaRN(
            told["factor"],
            config["max_position_embeddings"] if trained is None else trained,
            beta_fast=told.get("beta_fast") or 32.0,
            beta_slow=told.get("beta_slow") or 1.0,
            attention_factor=_attention_factor(told),
            truncate=told.get("truncate", True),
        )
    return None


def rope_words(base: float, scaling: Scaling | None) -> dict[str, Any] | None:
    """``rope_parameters`` of config.json; None where it has no words for this scaling."""
    words: dict[str, Any] = {"rope_type": "default", "rope_theta": base}
    if isinstance(scaling, Linear):
        words |= {"rope_type": "linear", "factor": scaling.factor}
    elif isinstance(scaling, Llama3):
        words |= {"rope_type": "llama3", "factor": scaling.factor, _TRAINED: scaling.trained_len}
        words |= {key: getattr(scaling, key) for key in _LLAMA3}
    elif isinstance(scaling, YaRN):
        words |= {"rope_type": "yarn", "factor": scaling.factor, _TRAINED: scaling.trained_len}
        words |= {key: getattr(scaling, key) for key in ("beta_fast", "beta_slow", "truncate")}
        words |= {} if scaling.attention_factor is None else {"attention_factor": scaling.attention_factor}
    elif scaling is not None:
        return None
    return words


def _told(config: Mapping[str, Any]) -> Any:
    """Both spellings, the older one with ``rope_theta`` beside it."""
    return config.get("rope_parameters") or config.get("rope_scaling") or {}


def _kind(told: Mapping[str, Any]) -> str:
    return told.get("rope_type") or told.get("type") or "default"


def _attention_factor(told: Mapping[str, Any]) -> float | None:
    own, one, all_of = (told.get(key) for key in ("attention_factor", "mscale", "mscale_all_dim"))
    if own is not None or not (one and all_of):
        return own

    def grown(by: float) -> float:
        return 1.0 if told["factor"] <= 1 else 0.1 * by * math.log(told["factor"]) + 1.0

    return grown(one) / grown(all_of)
