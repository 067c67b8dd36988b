"""Helpers for projections, that is, linear layers, convolutions and their replacements (8-bit layers, adapters)."""

from __future__ import annotations

from collections.abc import Mapping

from torch import Tensor, nn


def weight_of(layer: nn.Module) -> Tensor | None:
    """Return the weight of a projection layer, which determines the dtype and device of its input.

    Return None for 8-bit layers, whose weights are integer codes, and for adapters, which wrap the layer that has the
    weights. Both check their inputs themselves.
    """
    weight = getattr(layer, "weight", None)
    return weight if isinstance(weight, Tensor) and weight.is_floating_point() else None


def reasons_against_plain(layers: Mapping[str, nn.Module], theirs: str) -> list[str]:
    """Return a reason for each projection that is not a plain linear layer and so cannot be converted.

    Args:
        layers: the layers by name.
        theirs: the owner of the layers to which the weights are copied, for the message.
    """
    return [
        f"its {name} is {type(layer).__name__}; {theirs} has a plain linear layer"
        for name, layer in layers.items()
        if not isinstance(layer, nn.Linear) or type(layer).forward is not nn.Linear.forward
    ]
