"""Build a layer norm or a root-mean-square norm by name."""

from __future__ import annotations

from collections.abc import Callable
from typing import Literal

from torch import nn

from saccade.support.validation import check_choice, check_number

Norm = Literal["layer", "layer_without_bias", "rms"]

NORMS: dict[str, Callable[[int, float], nn.Module]] = {
    "layer": nn.LayerNorm,
    "layer_without_bias": lambda embed_dim, eps: nn.LayerNorm(embed_dim, eps, bias=False),
    "rms": nn.RMSNorm,
}


def make_norm(norm: str, embed_dim: int, norm_eps: float) -> nn.Module:
    """Build a norm over the last axis: a layer norm (with or without a bias) or a root-mean-square norm.

    Raises:
        ValueError: the name is unknown, or ``norm_eps`` is not a number above 0.
    """
    return NORMS[check_choice("norm", norm, NORMS)](embed_dim, check_number("norm_eps", norm_eps, above=0))
