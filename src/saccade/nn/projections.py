"""Projections: linear layers and convolutions of ours, and what others put in their places."""

from __future__ import annotations

from collections.abc import Mapping

from torch import Tensor, nn

__all__ = ["reasons_against_plain", "weight_of"]


def weight_of(layer: nn.Module) -> Tensor | None:
    """The weight that a layer's input must be like; None where there is none to look at.

    A layer of 8 bits has a method of that name and codes for numbers, an adapter keeps inside of it the layer that has
    a weight. What these take is for them to say.
    """
    weight = getattr(layer, "weight", None)
    return weight if isinstance(weight, Tensor) and weight.is_floating_point() else None


def reasons_against_plain(layers: Mapping[str, nn.Module], theirs: str) -> list[str]:
    """Why the weights of some layers, by name, do not say all that these compute; empty: they do.

    Args:
        layers: where a linear layer is expected.
        theirs: whose layers take these weights.
    """
    return [
        f"its {name} is {type(layer).__name__}; {theirs} has a plain linear layer"
        for name, layer in layers.items()
        if not isinstance(layer, nn.Linear) or type(layer).forward is not nn.Linear.forward
    ]
