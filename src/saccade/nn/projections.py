"""Projections: linear layers and convolutions, and what users may put in their place."""

from __future__ import annotations

from collections.abc import Mapping

from torch import Tensor, nn

__all__ = ["reasons_against_plain", "weight_of"]


def weight_of(layer: nn.Module) -> Tensor | None:
    """The weight whose dtype and device a layer's input must have; None where there is no such weight to see.

    The weights of an 8-bit layer are integer codes, and an adapter hides the layer that has weights: these check their
    inputs themselves.
    """
    weight = getattr(layer, "weight", None)
    return weight if isinstance(weight, Tensor) and weight.is_floating_point() else None


def reasons_against_plain(layers: Mapping[str, nn.Module], theirs: str) -> list[str]:
    """Why some layers, by name, compute something else than plain linear layers; empty if they do not.

    Args:
        layers: where a linear layer is expected.
        theirs: whose layers are to take these weights.
    """
    return [
        f"its {name} is {type(layer).__name__}; {theirs} has a plain linear layer"
        for name, layer in layers.items()
        if not isinstance(layer, nn.Linear) or type(layer).forward is not nn.Linear.forward
    ]
