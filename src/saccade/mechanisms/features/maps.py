"""Feature maps: what is made of a query or key alone, so that two of them are compared by a product."""

from __future__ import annotations

from collections.abc import Callable
from typing import Literal

from torch import Tensor
from torch.nn import functional as F

from saccade.arguments import one_of
from saccade.errors import kind, type_error

__all__ = ["FeatureMap", "FeatureMapName", "feature_map_of"]

FeatureMapName = Literal["elu", "relu", "squared_relu"]
FeatureMap = Callable[[Tensor], Tensor]


def _elu(x: Tensor) -> Tensor:
    return F.elu(x).add_(1.0)


def _squared_relu(x: Tensor) -> Tensor:
    return F.relu(x).square()


# Functions with names: a mechanism is pickled with its own.
_MAPS: dict[str, FeatureMap] = {"elu": _elu, "relu": F.relu, "squared_relu": _squared_relu}


def feature_map_of(feature_map: FeatureMapName | FeatureMap, where: str) -> FeatureMap:
    """The function of a name, or the function given.

    Raises:
        ValueError: an unknown name.
        TypeError: neither a name nor a function.
    """
    if isinstance(feature_map, str):
        return _MAPS[one_of(where, "feature_map", feature_map, _MAPS, hint="a function of your own will do, too")]
    if not callable(feature_map):
        raise type_error(where, "feature_map", f"be one of {', '.join(_MAPS)}, or a function", kind(feature_map))
    return feature_map
