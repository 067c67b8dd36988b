"""What caches ask of a mask, beside who may attend to whom."""

from __future__ import annotations

from saccade.masks import Causal, Full, Mask, Window
from saccade.masks.algebra import And, Not, Or

__all__ = ["is_relative", "sees_all_before", "tells_heads_apart"]


def sees_all_before(rule: Mask | None) -> bool:
    """Whether a query sees every token that came before it."""
    return rule is None or type(rule) is Causal


def tells_heads_apart(rule: Mask | None) -> bool:
    """Whether a rule may say something else for another head or batch item."""
    return rule is not None and (rule.shape != (1, 1) or rule.asks_functions)


def is_relative(rule: Mask) -> bool:
    """Whether a rule surely asks for nothing but how far a key stands from the query."""
    if isinstance(rule, And | Or):
        return all(map(is_relative, rule.parts))
    return is_relative(rule.part) if isinstance(rule, Not) else isinstance(rule, Causal | Window | Full)
