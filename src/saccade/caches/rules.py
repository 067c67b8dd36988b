"""What caches ask of a mask, beside who may attend to whom."""

from __future__ import annotations

from saccade.masks import Causal, Mask

__all__ = ["sees_all_before", "tells_heads_apart"]


def sees_all_before(rule: Mask | None) -> bool:
    """Whether a query sees every token that came before it."""
    return rule is None or type(rule) is Causal


def tells_heads_apart(rule: Mask | None) -> bool:
    """Whether a rule may say something else for another head or batch item."""
    return rule is not None and (rule.shape != (1, 1) or rule.asks_functions)
