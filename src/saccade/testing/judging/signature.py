"""Read from a kernel's signature how it takes its mask, and which options it takes."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from typing import Any

from saccade.testing.kernel_under_test import OPTIONS

_FLAGS = ("causal", "is_causal")
_MASKS = ("mask", "attn_mask", "attention_mask")


def mask_settings(kernel: Callable[..., Any]) -> dict[str, str]:
    """Infer from a kernel's signature how it takes its mask, as settings for the `layout` adapter.

    The settings are {} if the mask is simply the fourth argument.

    - A parameter such as ``attn_mask`` that is not the fourth is passed by its name.
    - With a flag ``causal`` or ``is_causal`` and no mask, the flag is used, with ``window_size`` if there is one.
    - With neither, the kernel computes full attention, so it is called without a mask.
    """
    parameters = _parameters(kernel)
    if parameters is None or any(parameter.kind is parameter.VAR_POSITIONAL for parameter in parameters.values()):
        return {}
    names, fourth = list(parameters), next(iter(list(parameters.values())[3:]), None)
    name = next((name for name in _MASKS if name in names), None)
    if name is not None:
        is_fourth = names.index(name) == 3 and parameters[name].kind is not inspect.Parameter.KEYWORD_ONLY
        return {} if is_fourth else {"mask_name": name}
    may_be_mask = fourth is not None and _may_be_mask(fourth)
    flag = next((name for name in _FLAGS if name in names), None)
    if flag is None or (may_be_mask and "mask" in names[3].lower()):
        return {} if may_be_mask else {"masks": "none"}
    masks = {"masks": "window" if "window_size" in names else "causal"}
    return masks if flag == "causal" else masks | {"mask_name": flag}


def options_of(
    kernel: Callable[..., Any], names: Mapping[str, str], known: tuple[str, ...] = OPTIONS
) -> tuple[str, ...]:
    """Return the options among ``known`` in a kernel's signature. ``names`` maps options to the kernel's names."""
    parameters = _parameters(kernel) or {}
    return tuple(name for name in known if names.get(name, name) in parameters and name != "relative")


def _parameters(kernel: Callable[..., Any]) -> Mapping[str, inspect.Parameter] | None:
    try:
        return inspect.signature(kernel).parameters
    except (TypeError, ValueError):  # a builtin has no signature
        return None


def _may_be_mask(parameter: inspect.Parameter) -> bool:
    """Return whether a fourth parameter may be a mask: positional, not a known option, and required or None."""
    is_positional = parameter.kind in (parameter.POSITIONAL_ONLY, parameter.POSITIONAL_OR_KEYWORD)
    return is_positional and parameter.name not in OPTIONS and parameter.default in (parameter.empty, None)
