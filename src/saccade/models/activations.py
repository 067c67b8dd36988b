"""Activations by the names that published configurations use."""

from __future__ import annotations

from saccade.nn.feed_forward import Activation

__all__ = ["ACTIVATIONS"]

ACTIVATIONS: dict[str, Activation] = {
    "gelu": "gelu",
    "gelu_new": "gelu_tanh",
    "gelu_pytorch_tanh": "gelu_tanh",
    "relu": "relu",
    "silu": "silu",
    "swish": "silu",
}
