"""FeatureMechanism: compares queries and keys by a product of features; what Linear and Performer share."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Hashable
from typing import NamedTuple

import torch
from torch import Tensor

from saccade.caches import RecurrentCache
from saccade.engine.at_positions import GivenPositions
from saccade.masks import Mask
from saccade.mechanisms.base import Mechanism
from saccade.mechanisms.contents import is_surely_finite
from saccade.mechanisms.features.matrix import FeatureMatrix, Features
from saccade.mechanisms.features.visible import Visible, why_no_sum
from saccade.mechanisms.inputs import checked_inputs

__all__ = ["FeatureMechanism", "Made"]


class Made(NamedTuple):
    """Features of queries and keys, and something equal for features that may be summed together."""

    query: Features
    key: Features
    source: Hashable = None


class FeatureMechanism(Mechanism):
    """A mechanism that makes a `FeatureMatrix`."""

    eps: float = 0.0

    @abstractmethod
    def features(self, query: Tensor, key: Tensor) -> Made:
        """Features of ``[batch, heads, len, head_dim]`` in float32 or wider, all finite."""

    def reasons(self, mask: Mask) -> tuple[str, ...]:
        return why_no_sum(mask)

    def new_cache(self, max_len: int | None = None) -> RecurrentCache:
        """An empty `saccade.caches.RecurrentCache`, of constant size."""
        return RecurrentCache(max_len)

    def forward(
        self,
        query: Tensor,
        key: Tensor,
        *,
        mask: object = None,
        q_positions: GivenPositions = None,
        kv_positions: GivenPositions = None,
    ) -> FeatureMatrix:
        given = checked_inputs(self, query, key, mask, q_positions, kv_positions)
        (query, spoilt), (key, tainted) = (_finite(x, given.wide) for x in (given.query, given.key))
        made = self.features(query, key)
        return FeatureMatrix(
            made.query,
            made.key,
            Visible.of(given),
            dtype=given.query.dtype,
            eps=self.eps,
            tainted=tainted,
            spoilt=spoilt,
            source=made.source,
        )


def _finite(x: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor | None]:
    """Tokens with 0 for those that are not finite, and which these are; None where there are surely none."""
    if is_surely_finite(x):
        return x.to(dtype), None
    bad = ~torch.isfinite(x.detach()).all(-1)
    return x.masked_fill(bad[..., None], 0.0).to(dtype), bad
