"""Mechanism: a module that makes a matrix from queries and keys."""

from __future__ import annotations

from abc import abstractmethod
from typing import TypeVar

from torch import Tensor, nn

from saccade.caches import KVCache, LayerCache
from saccade.masks import Mask
from saccade.matrix import Matrix
from saccade.positions import Bias
from saccade.positions.token_positions import GivenPositions
from saccade.support.argument_hints import AnswersCalls
from saccade.support.errors import unsupported

__all__ = ["Mechanism"]

M = TypeVar("M", bound="Mechanism")
# Where a module of torch keeps who listens to it, and how each wants to be called.
_HOOKS: tuple[str, ...] = ("_forward_hooks", "_forward_hooks_with_kwargs", "_forward_hooks_always_called")
_HOOKS += ("_forward_pre_hooks", "_forward_pre_hooks_with_kwargs")


class Mechanism(AnswersCalls, nn.Module):
    """WHICH MATRIX comes of queries and keys. The one seam that caches, recordings and ranks use."""

    @property
    def treats_heads_alike(self) -> bool:
        """Whether products and the mask alone matter to its matrices, the same in every head.

        Caches then hand over heads as batch items, and say where tokens stand only where the mask asks.
        """
        return False

    def reasons(self, mask: Mask) -> tuple[str, ...]:
        """Why this mask cannot be had; an empty tuple means that it can."""
        return ()

    def new_cache(self, max_len: int | None = None) -> LayerCache:
        """An empty cache that fits: by default a `saccade.caches.KVCache`, which is exact for every mechanism.

        Args:
            max_len: room for so many tokens, taken at once; None to grow.
        """
        return KVCache(max_len)

    def with_bias(self, bias: Tensor | Bias) -> Mechanism:
        """The same with a bias added to its scores, for one call.

        Raises:
            UnsupportedError: it has no scores to which anything could be added, or has a bias already.
        """
        name = type(self).__name__
        raise unsupported(
            "bias", [f"{name} has no scores to which it could be added"], hint="mechanism=Softmax() adds it"
        )

    def _stood_in_for_by(self, other: M) -> M:
        """``other``, which runs for this one in one call: who listens to this one hears it."""
        for hooks in _HOOKS:
            setattr(other, hooks, getattr(self, hooks))
        return other

    @abstractmethod
    def forward(
        self,
        query: Tensor,
        key: Tensor,
        *,
        mask: object = None,
        q_positions: GivenPositions = None,
        kv_positions: GivenPositions = None,
    ) -> Matrix:
        """The matrix for ``query [batch, heads, q_len, head_dim]`` and ``key [batch, kv_heads, kv_len, head_dim]``."""
