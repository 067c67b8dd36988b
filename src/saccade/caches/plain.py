"""Whether a matrix depends on nothing but products of queries and keys, and on which masks it may be cut by heads."""

from __future__ import annotations

from saccade.caches.layer_cache import MakesMatrix
from saccade.masks import Causal, Mask

__all__ = ["is_plain", "is_relative", "sees_all_before", "tells_heads_apart"]

_OWN = ("score", "bias", "sink_logit")


def is_plain(mechanism: MakesMatrix) -> bool:
    """Softmax of dot products, all heads alike: positions are asked by the mask alone, and heads may be run apart."""
    return all(hasattr(mechanism, name) and getattr(mechanism, name) is None for name in _OWN)


def sees_all_before(rule: Mask | None) -> bool:
    """Whether a query sees every token that came before it."""
    return rule is None or type(rule) is Causal


def tells_heads_apart(rule: Mask | None) -> bool:
    """Whether a rule may say something else for another head or batch item."""
    return rule is not None and (rule.shape != (1, 1) or rule.asks_functions)


def is_relative(rule: Mask) -> bool:
    """Whether a rule surely asks for nothing but how far a key stands from the query."""
    return rule.is_relative
