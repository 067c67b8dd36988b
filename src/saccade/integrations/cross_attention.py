"""Classify a model's attention calls as self-attention or cross-attention by names, arguments and lengths."""

from __future__ import annotations

import enum
import inspect
import re
from typing import Any

import torch
from torch import Tensor

from saccade.integrations.redirect_mode import Site
from saccade.support.torch_modes import is_plain


class Kind(enum.Enum):
    """The kind of an attention call: self-attention, cross-attention or unknown."""

    SELF = "self-attention"
    CROSS = "cross-attention"
    UNKNOWN = "unknown"


_CROSS = re.compile(
    r"cross.?att|att\w*.?cross|cross_?attn|xattn|enc(oder)?_?dec|encoder_attn|src_attn|multihead_attn|memory_att|attn2$",
    re.IGNORECASE,
)
# Parameters of ``forward`` that receive the second sequence in cross-attention, and None in self-attention.
_OTHER = re.compile(
    r"context\w*|memory|xa|enc|cond|kv|source|src|encoder_\w+|enc_\w+|\w*encoder_(hidden_states|output\w*|out)|"
    r"key_value_states|cross\w*states|kv_\w+|other|y|z",
    re.IGNORECASE,
)
_KEY = re.compile(r"k|keys?", re.IGNORECASE)
_NO_SEQUENCE = re.compile(r"mask|bias|pos|emb|rope|rot|freq|cos|sin|time|resid|state|cache|past|index|len|scale|weight")
_DEPTH = 3  # maximum number of modules to check, innermost first, while their inputs are already split into heads


def is_named_cross(name: str, kind: str) -> bool:
    """Return whether a module's name or class name marks it as cross-attention."""
    return bool(_CROSS.search(kind)) or any(_CROSS.search(part) for part in name.split("."))


def kind_of_call(site: Site, q_len: int, kv_len: int) -> Kind:
    """Return whether an attention call of a running module is self-attention, cross-attention or unknown.

    The module's name is checked first, then its arguments for a second sequence. If neither shows the kind, equal
    lengths mean self-attention, and unequal lengths leave it unknown. It is also unknown if a second sequence of equal
    length might consist of the same tokens, such as the keys in ``attention(x + positions, x)``.
    """
    if is_named_cross(site.name, type(site.module).__name__):
        return Kind.CROSS
    kind = _by_arguments(site, q_len == kv_len)
    if kind is not None:
        return kind
    return Kind.SELF if q_len == kv_len else Kind.UNKNOWN


def _by_arguments(site: Site, is_equally_long: bool) -> Kind | None:
    """Infer the kind of a call from the arguments of the running module and its enclosing modules; None if unclear."""
    inner: Site | None = site
    for _ in range(_DEPTH):
        if inner is None:
            return None
        arguments = _arguments(inner)
        tensors = [(name, x) for name, x in arguments.items() if isinstance(x, Tensor) and x.is_floating_point()]
        if not tensors:
            return None
        if tensors[0][1].dim() < 4:
            return _by_tensors(arguments, tensors, is_equally_long)
        inner = inner.outer  # these inputs are split into heads; an enclosing module received them unsplit
    return None


def _by_tensors(arguments: dict[str, Any], tensors: list[tuple[str, Tensor]], is_equally_long: bool) -> Kind | None:
    (_, query), *others = tensors
    for name, x in others:
        is_sequence = _OTHER.fullmatch(name) or not _NO_SEQUENCE.search(name)
        if not (is_sequence and x.dim() == query.dim() > 1):
            continue
        if x is query or are_bitwise_equal(x, query):
            return Kind.SELF
        if _OTHER.fullmatch(name):
            return Kind.CROSS
        if _KEY.fullmatch(name) and not is_equally_long:
            return Kind.CROSS
        if x.shape[-1] == query.shape[-1] or _KEY.fullmatch(name):
            return Kind.UNKNOWN
    takes_other = any(_OTHER.fullmatch(name) and x is None for name, x in arguments.items())
    return Kind.SELF if takes_other else None


def _arguments(site: Site) -> dict[str, Any]:
    """Return a running module's arguments by parameter name, including defaults."""
    kinds = type(site.module).__mro__
    forward = next(
        kind.__dict__["forward"] for kind in kinds if "forward" in kind.__dict__ and not _is_from_saccade(kind)
    )
    try:
        bound = inspect.signature(forward).bind(site.module, *site.args, **site.kwargs)
    except (TypeError, ValueError):  # a forward without a signature, or wrapped by a function with a different one
        by_index = {f"[{index}]": x for index, x in enumerate(site.args)}
        return by_index | site.kwargs
    bound.apply_defaults()
    named: dict[str, Any] = {}
    for name, x in [*bound.arguments.items()][1:]:
        kind = bound.signature.parameters[name].kind
        if kind is inspect.Parameter.VAR_KEYWORD:
            named.update(x)
        elif kind is inspect.Parameter.VAR_POSITIONAL:
            named.update({f"{name}[{index}]": item for index, item in enumerate(x)})
        else:
            named[name] = x
    return named


def _is_from_saccade(kind: type) -> bool:
    return kind.__module__.startswith("saccade.") or "swapped_from" in vars(kind)


def are_bitwise_equal(first: Tensor, second: Tensor) -> bool:
    """Return whether two tensors are bitwise equal, including NaN."""
    if first.shape != second.shape or first.dtype != second.dtype or first.device != second.device:
        return False
    if first.is_meta or not (is_plain(first) and is_plain(second)):
        return False
    bits = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}[first.dtype.itemsize]
    return torch.equal(first.detach().view(bits), second.detach().view(bits))
