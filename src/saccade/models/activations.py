"""Activations by the names that published configurations use."""

from __future__ import annotations

from saccade.nn.feed_forward import Activation

__all__ = ["ACTIVATIONS", "published_name"]

ACTIVATIONS: dict[str, Activation] = {
    "gelu": "gelu",
    "gelu_new": "gelu_tanh",
    "gelu_pytorch_tanh": "gelu_tanh",
    "relu": "relu",
    "silu": "silu",
    "swish": "silu",
}


def published_name(activation: Activation, *, gelu_tanh: str) -> str:
    """The name that configurations use; that of ``"gelu_tanh"`` differs from family to family."""
    return gelu_tanh if activation == "gelu_tanh" else activation
