"""Helpers for projections: linear layers, convolutions, and layers that may replace them."""

from __future__ import annotations

from collections.abc import Mapping

from torch import Tensor, nn


def weight_of(layer: nn.Module) -> Tensor | None:
    """Return the weight whose dtype and device the input of a projection must have, or None.

    The weights of an 8-bit layer are integer codes, and an adapter hides the layer with the weights: these check their
    inputs themselves.
    """
    weight = getattr(layer, "weight", None)
    return weight if isinstance(weight, Tensor) and weight.is_floating_point() else None


def reasons_against_plain(layers: Mapping[str, nn.Module], theirs: str) -> list[str]:
    """Return which of some projections are not plain linear layers; empty if all are.

    Args:
        layers: the layers by name.
        theirs: the owner of the layers to copy the weights to, for the message.
    """
    return [
        f"its {name} is {type(layer).__name__}; {theirs} has a plain linear layer"
        for name, layer in layers.items()
        if not isinstance(layer, nn.Linear) or type(layer).forward is not nn.Linear.forward
    ]
