"""Linear: linear attention, and its feature maps."""

from __future__ import annotations

from collections.abc import Callable
from typing import Literal

from torch import Tensor
from torch.nn import functional as F

from saccade.mechanisms.features.feature_matrix import FeatureMechanism, Features
from saccade.support.errors import kind, type_error, value_error
from saccade.support.validation import check_choice, check_number, check_type

FeatureMapName = Literal["elu", "relu", "squared_relu"]
FeatureMap = Callable[[Tensor], Tensor]


def _elu(x: Tensor) -> Tensor:
    return F.elu(x).add_(1.0)


def _squared_relu(x: Tensor) -> Tensor:
    return F.relu(x).square()


# Named functions, so that a mechanism can be pickled.
_MAPS: dict[str, FeatureMap] = {"elu": _elu, "relu": F.relu, "squared_relu": _squared_relu}


class Linear(FeatureMechanism):
    r"""Linear attention: weights are dot products of query and key features, and matrix products take linear time.

    .. math:: A_{ij} = \frac{\phi(q_i) \cdot \phi(k_j)}{\epsilon + \sum_{j'} \phi(q_i) \cdot \phi(k_{j'})}

    It does not approximate softmax, so a model must be trained with it. Dot products are not scaled.

    Args:
        feature_map: φ: "elu" (elu(x) + 1, always above 0), "relu" or "squared_relu", each applied elementwise; or a
            function that maps ``[batch, heads, len, head_dim]`` to ``[batch, heads, len, features]``, each token
            separately.
        eps: added to the denominator. It may be 0, since a row whose denominator is 0 is set to 0.

    Raises:
        TypeError, ValueError: an unknown feature map, or an eps below 0.
        UnsupportedError: any mask except Causal, Documents, masks that depend only on keys (Padding), and combinations
            of these with ``&``.

    Cost: O(n * features * value_dim) time and O(n * features) memory; see `FeatureMatrix`. Decoding with a
    `saccade.caches.RecurrentCache` takes constant memory.

    Example:
        >>> import torch
        >>> from saccade.masks import Causal
        >>> query = key = torch.ones(1, 2, 4, 8)
        >>> Linear()(query, key, mask=Causal())[0, 0, 1].tolist()
        [0.5, 0.5, 0.0, 0.0]

    Reference: Katharopoulos et al. 2020, arXiv:2006.16236, sections 3.2 and 3.3; squared ReLU: So et al. 2021,
    arXiv:2109.08668.
    """

    def __init__(self, feature_map: FeatureMapName | FeatureMap = "elu", *, eps: float = 0.0):
        super().__init__()
        self.feature_map = feature_map
        self._map = _map_of(feature_map)
        self.eps = check_number("eps", eps, least=0.0)

    def features(self, query: Tensor, key: Tensor) -> tuple[Features, Features, None]:
        mapped = self._features(query), self._features(key)
        counts = [of.values.shape[3] for of in mapped]
        if counts[0] != counts[1]:
            got = f"{counts[0]} and {counts[1]}"
            raise value_error("features", "be equal in number for queries and keys", got)
        return *mapped, None

    def _features(self, x: Tensor) -> Features:
        values = check_type("feature_map", self._map(x), Tensor, "return a tensor")
        if values.dim() != 4 or values.shape[:3] != x.shape[:3]:
            rule = f"return [{', '.join(map(str, x.shape[:3]))}, features]"
            raise value_error("feature_map", rule, list(values.shape))
        return Features(values.to(x.dtype))

    def extra_repr(self) -> str:
        name = self.feature_map if isinstance(self.feature_map, str) else getattr(self.feature_map, "__name__", "own")
        return repr(name) + (f", eps={self.eps}" if self.eps else "")


def _map_of(feature_map: FeatureMapName | FeatureMap) -> FeatureMap:
    """Return the feature map for a name. If a function is passed, return it unchanged."""
    if isinstance(feature_map, str):
        hint = "or pass your own function"
        return _MAPS[check_choice("feature_map", feature_map, _MAPS, hint=hint)]
    if not callable(feature_map):
        raise type_error("feature_map", f"be one of {', '.join(map(repr, _MAPS))}, or a function", kind(feature_map))
    return feature_map
