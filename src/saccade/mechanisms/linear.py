"""Linear: attention by products of features."""

from __future__ import annotations

from torch import Tensor

from saccade.arguments import number
from saccade.errors import type_error, value_error
from saccade.mechanisms.features.maps import FeatureMap, FeatureMapName, feature_map_of
from saccade.mechanisms.features.matrix import Features
from saccade.mechanisms.features.mechanism import FeatureMechanism

__all__ = ["Linear"]


class Linear(FeatureMechanism):
    r"""Compares queries and keys by a product of features, which needs no pairs: linear time.

    .. math:: A_{ij} = \frac{\phi(q_i) \cdot \phi(k_j)}{\epsilon + \sum_{j'} \phi(q_i) \cdot \phi(k_{j'})}

    Another attention, not an approximation of softmax: a model has to be trained with it. There is no scale. It is
    exact in one case: where φ(q)·φ(k) is the kernel that is wanted.

    Args:
        feature_map: φ, entry by entry "elu" (elu(x) + 1, always above 0), "relu" or "squared_relu"; or a function
            from ``[batch, heads, len, head_dim]`` to ``[batch, heads, len, features]``, of each token alone.
        eps: added to the denominator. A row whose denominator is 0 is 0, so none is needed.

    Raises:
        TypeError, ValueError: an unknown feature map, or an eps below 0.
        UnsupportedError: a mask other than Causal, Padding, Documents and what ``&`` joins of them.

    Cost: O(n * features * value_dim) time and O(n * features) memory; see `FeatureMatrix`. Decoding takes constant
    memory: `saccade.caches.RecurrentCache`.

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
        self._map = feature_map_of(feature_map, "Linear")
        self.eps = number("Linear", "eps", eps, least=0.0)

    def features(self, query: Tensor, key: Tensor) -> tuple[Features, Features, None]:
        made = self._features(query), self._features(key)
        counts = [of.values.shape[3] for of in made]
        if counts[0] != counts[1]:
            got = f"{counts[0]} and {counts[1]}"
            raise value_error("Linear", "features", "be as many for queries as for keys", got)
        return *made, None

    def _features(self, x: Tensor) -> Features:
        values = self._map(x)
        if not isinstance(values, Tensor):
            raise type_error("Linear", "feature_map", "return a tensor", type(values).__name__)
        if values.dim() != 4 or values.shape[:3] != x.shape[:3]:
            rule = f"return [{', '.join(map(str, x.shape[:3]))}, features]"
            raise value_error("Linear", "feature_map", rule, list(values.shape))
        return Features(values.to(x.dtype))

    def extra_repr(self) -> str:
        name = self.feature_map if isinstance(self.feature_map, str) else getattr(self.feature_map, "__name__", "own")
        return repr(name) + (f", eps={self.eps}" if self.eps else "")
