"""Helpers for projection layers and their replacements (8-bit layers, adapters)."""

from __future__ import annotations

from collections.abc import Mapping

from torch import Tensor, nn


def weight_of(layer: nn.Module) -> Tensor | None:
    """Return the weight of a projection, or None. The projection's input must have the weight's dtype and device.

    The result is None for 8-bit layers, because their weights are integer codes, and for adapters, because the layer
    that they wrap has the weights. Both check their inputs themselves.
    """
    weight = getattr(layer, "weight", None)
    return weight if isinstance(weight, Tensor) and weight.is_floating_point() else None


def is_only_product(layer: nn.Module) -> bool:
    """Return whether a call of the layer is a product with its weight and nothing else: no bias, hook or adapter."""
    changed = ("forward", "_forward", "_backward")  # a method of this object alone, and hooks
    is_changed = any(value for name, value in vars(layer).items() if name.startswith(changed))
    return type(layer) is nn.Linear and layer.bias is None and not is_changed


def reasons_against_plain(layers: Mapping[str, nn.Module], target: str) -> list[str]:
    """Return a reason for each projection that cannot be converted because it is not a plain linear layer.

    Args:
        layers: the layers by name.
        target: the layer that needs the weights, for the message, such as "torch's layer".
    """
    return [
        f"its {name} is {type(layer).__name__}; {target} has a plain linear layer"
        for name, layer in layers.items()
        if not isinstance(layer, nn.Linear) or type(layer).forward is not nn.Linear.forward
    ]
