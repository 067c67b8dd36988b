"""Read and write the rotary (RoPE) settings in config.json."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping
from typing import Any

from saccade.positions import Linear, Llama3, Scaling, YaRN

_KINDS: dict[str, Any] = {"linear": Linear, "llama3": Llama3, "yarn": YaRN}  # "default" has no scaling
_TRAINED = "original_max_position_embeddings"  # our trained_len; every other key has the name of our field


def rope_reasons(config: Mapping[str, Any]) -> list[str]:
    """Return the reasons why our rotary angles would differ from those of the published model.

    An empty list means that the angles are equal.
    """
    settings = _settings(config)
    if not isinstance(settings, Mapping):
        return [f"rope_parameters is not a JSON object but {settings!r}"]
    kind = _kind(settings)
    if kind == "dynamic":
        reason = (
            "rope_type 'dynamic' has angles that change with the length, so a "
            "run with a cache cannot equal the full run"
        )
        return [reason]
    if kind not in ("default", *_KINDS):
        return [f"rope_type is {kind!r}, not one of default, {', '.join(_KINDS)}"]
    fields = _fields(kind)
    optional = (_TRAINED,) if kind == "yarn" else ()
    needed = [key for key, field in fields.items() if field.default is dataclasses.MISSING and key not in optional]
    missing = [key for key in needed if settings.get(key) is None]
    reasons = [f"rope_type {kind!r} lacks {', '.join(missing)}"] if missing else []
    if settings.get("partial_rotary_factor", 1.0) != 1.0:
        reasons.append(f"partial_rotary_factor is {settings['partial_rotary_factor']}, not 1")
    known = {*fields, "rope_type", "type", "rope_theta", "partial_rotary_factor"}
    known |= {"mscale", "mscale_all_dim"} if kind == "yarn" else set()
    unknown = [key for key, x in settings.items() if key not in known and x is not None and kind != "default"]
    if unknown:
        reasons.append(f"rope_type {kind!r} has {', '.join(unknown)}, which saccade does not support")
    return reasons


def rope_base(config: Mapping[str, Any]) -> float:
    """Return the base of the rotary frequencies in config.json."""
    base = _settings(config).get("rope_theta")
    base = config.get("rope_theta") if base is None else base
    return 10000.0 if base is None else base


def rope_scaling(config: Mapping[str, Any]) -> Scaling | None:
    """Return the scaling of the rotary frequencies in config.json, or None for the default."""
    settings = _settings(config)
    kind = _kind(settings)
    if kind not in _KINDS:
        return None
    options = {field.name: settings[key] for key, field in _fields(kind).items() if settings.get(key) is not None}
    if kind == "yarn":
        options = {name: x for name, x in options.items() if x or not name.startswith("beta_")}  # 0 means the default
        defaults = {"trained_len": config["max_position_embeddings"], "attention_factor": _attention_factor(settings)}
        options = defaults | options
    return _KINDS[kind](**options)


def rope_parameters_of(base: float, scaling: Scaling | None) -> dict[str, Any] | None:
    """Return the ``rope_parameters`` to write to config.json, or None if they cannot express the scaling."""
    if scaling is None:
        return {"rope_type": "default", "rope_theta": base}
    kind = next((kind for kind, scaling_class in _KINDS.items() if type(scaling) is scaling_class), None)
    if kind is None:
        return None
    options = {key: getattr(scaling, field.name) for key, field in _fields(kind).items()}
    return {"rope_type": kind, "rope_theta": base, **{key: x for key, x in options.items() if x is not None}}


def _fields(kind: str) -> dict[str, dataclasses.Field[Any]]:
    """Return a dict that maps the keys of a RoPE type in config.json to the fields of our scaling class."""
    fields = dataclasses.fields(_KINDS[kind]) if kind in _KINDS else ()
    return {_TRAINED if field.name == "trained_len" else field.name: field for field in fields}


def _settings(config: Mapping[str, Any]) -> Any:
    """Return the rotary settings in config.json.

    Older files store them under a different key and without ``rope_theta``.
    """
    return config.get("rope_parameters") or config.get("rope_scaling") or {}


def _kind(settings: Mapping[str, Any]) -> str:
    return settings.get("rope_type") or settings.get("type") or "default"


def _attention_factor(settings: Mapping[str, Any]) -> float | None:
    """Compute YaRN's attention factor from the RoPE settings in config.json, or return None if some are missing."""
    factor, scale, scale_all = (settings.get(key) for key in ("factor", "mscale", "mscale_all_dim"))
    if not (factor and scale and scale_all):
        return None

    def magnitude(scale: float) -> float:
        return 1.0 if factor <= 1 else 0.1 * scale * math.log(factor) + 1.0

    return magnitude(scale) / magnitude(scale_all)
