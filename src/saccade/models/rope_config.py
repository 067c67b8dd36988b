"""Rotary positions in config.json: read and written."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping
from typing import Any

from saccade.positions import Linear, Llama3, Scaling, YaRN

__all__ = ["rope_reasons", "rope_base", "rope_scaling", "rope_words"]

_KINDS: dict[str, Any] = {"linear": Linear, "llama3": Llama3, "yarn": YaRN}  # and "default", which changes nothing
_TRAINED = "original_max_position_embeddings"  # our trained_len; every other key has the name of our field


def rope_reasons(config: Mapping[str, Any]) -> list[str]:
    """Why we would turn by other angles than the authors of this file; empty if we would not."""
    told = _told(config)
    if not isinstance(told, Mapping):
        return [f"rope_parameters is no JSON object but {told!r}"]
    kind = _kind(told)
    if kind == "dynamic":
        reason = "rope_type 'dynamic' turns by angles that change with the length, so that no cache equals the full run"
        return [reason]
    if kind not in ("default", *_KINDS):
        return [f"rope_type is {kind!r}, not one of default, {', '.join(_KINDS)}"]
    fields = _fields(kind)
    optional = (_TRAINED,) if kind == "yarn" else ()
    needed = [key for key, field in fields.items() if field.default is dataclasses.MISSING and key not in optional]
    missing = [key for key in needed if told.get(key) is None]
    reasons = [f"rope_type {kind!r} lacks {', '.join(missing)}"] if missing else []
    if told.get("partial_rotary_factor", 1.0) != 1.0:
        reasons.append(f"partial_rotary_factor is {told['partial_rotary_factor']}, not 1")
    known = {*fields, "rope_type", "type", "rope_theta", "partial_rotary_factor"}
    known |= {"mscale", "mscale_all_dim"} if kind == "yarn" else set()
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
    if kind not in _KINDS:
        return None
    given = {field.name: told[key] for key, field in _fields(kind).items() if told.get(key) is not None}
    if kind == "yarn":
        given = {name: own for name, own in given.items() if own or not name.startswith("beta_")}  # 0: the default
        given = {"trained_len": config["max_position_embeddings"], "attention_factor": _magnitude(told), **given}
    return _KINDS[kind](**given)


def rope_words(base: float, scaling: Scaling | None) -> dict[str, Any] | None:
    """``rope_parameters`` of config.json; None where it cannot express this scaling."""
    if scaling is None:
        return {"rope_type": "default", "rope_theta": base}
    kind = next((kind for kind, own in _KINDS.items() if type(scaling) is own), None)
    if kind is None:
        return None
    words = {key: getattr(scaling, field.name) for key, field in _fields(kind).items()}
    return {"rope_type": kind, "rope_theta": base, **{key: own for key, own in words.items() if own is not None}}


def _fields(kind: str) -> dict[str, dataclasses.Field[Any]]:
    """The fields of our class for a type, by the keys of config.json."""
    own = dataclasses.fields(_KINDS[kind]) if kind in _KINDS else ()
    return {_TRAINED if field.name == "trained_len" else field.name: field for field in own}


def _told(config: Mapping[str, Any]) -> Any:
    """The settings in either spelling; the older one has ``rope_theta`` beside it."""
    return config.get("rope_parameters") or config.get("rope_scaling") or {}


def _kind(told: Mapping[str, Any]) -> str:
    return told.get("rope_type") or told.get("type") or "default"


def _magnitude(told: Mapping[str, Any]) -> float | None:
    """The attention factor of a file that gives two numbers for it; None where there are none."""
    factor, one, all_of = (told.get(key) for key in ("factor", "mscale", "mscale_all_dim"))
    if not (factor and one and all_of):
        return None

    def grown(by: float) -> float:
        return 1.0 if factor <= 1 else 0.1 * by * math.log(factor) + 1.0

    return grown(one) / grown(all_of)
