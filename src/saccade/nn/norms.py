"""Norms, by the names that layers and models take."""

from __future__ import annotations

from collections.abc import Callable
from typing import Literal

from torch import nn

from saccade.arguments import is_finite_number
from saccade.errors import value_error

__all__ = ["NORMS", "Norm", "check_eps", "make_norm"]

Norm = Literal["layer", "layer_without_bias", "rms"]

NORMS: dict[str, Callable[[int, float], nn.Module]] = {
    "layer": nn.LayerNorm,
    "layer_without_bias": lambda embed_dim, eps: nn.LayerNorm(embed_dim, eps, bias=False),
    "rms": nn.RMSNorm,
}


def make_norm(norm: str, embed_dim: int, norm_eps: float, where: str) -> nn.Module:
    """A layer norm, one without a bias, or a root-mean-square norm, over the last axis.

    Raises:
        ValueError: another name, or ``norm_eps`` is no number above 0.
    """
    if not isinstance(norm, str) or norm not in NORMS:
        raise value_error(where, "norm", f"be one of {', '.join(NORMS)}", repr(norm))
    check_eps(where, norm_eps)
    return NORMS[norm](embed_dim, norm_eps)


def check_eps(where: str, norm_eps: object) -> None:
    """Raise unless ``norm_eps`` is a finite number above 0."""
    if not (is_finite_number(norm_eps) and norm_eps > 0):
        raise value_error(where, "norm_eps", "be a number above 0", repr(norm_eps))
