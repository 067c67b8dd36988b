"""FeatureMechanism: compares queries and keys by a product of features; what Linear and Performer share."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Hashable

import torch
from torch import Tensor

from saccade.caches import RecurrentCache
from saccade.masks import Mask
from saccade.mechanisms.checked_mechanism import Approximate, Inputs
from saccade.mechanisms.features.feature_matrix import FeatureMatrix, Features
from saccade.mechanisms.features.mask_support import Visible, why_no_sum
from saccade.mechanisms.value_access import is_surely_finite

__all__ = ["FeatureMechanism"]


class FeatureMechanism(Approximate):
    """A mechanism that makes a `FeatureMatrix`."""

    eps: float = 0.0

    @abstractmethod
    def features(self, query: Tensor, key: Tensor) -> tuple[Features, Features, Hashable]:
        """Features of queries and keys, ``[batch, heads, len, head_dim]`` in float32 or wider, all of them finite.

        The third value is equal for features that may be summed together.
        """

    def reasons(self, mask: Mask) -> tuple[str, ...]:
        return why_no_sum(mask)

    def new_cache(self, max_len: int | None = None) -> RecurrentCache:
        """An empty `saccade.caches.RecurrentCache`, of constant size."""
        return RecurrentCache(max_len)

    def _made(self, inputs: Inputs) -> FeatureMatrix:
        (query, spoilt), (key, tainted) = (_finite(x, inputs.wide) for x in (inputs.query, inputs.key))
        own, other, source = self.features(query, key)
        dtype, visible = inputs.query.dtype, Visible.of(inputs)
        return FeatureMatrix(
            own, other, visible, dtype=dtype, eps=self.eps, tainted=tainted, spoilt=spoilt, source=source
        )


def _finite(x: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor | None]:
    """Tokens with 0 for those that are not finite, and which these are; None where there are surely none."""
    if is_surely_finite(x):
        return x.to(dtype), None
    bad = ~torch.isfinite(x.detach()).all(-1)
    return x.masked_fill(bad[..., None], 0.0).to(dtype), bad
