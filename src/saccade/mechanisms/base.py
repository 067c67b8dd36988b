"""Mechanism: the base class of all modules that compute an attention matrix from queries and keys."""

from __future__ import annotations

from abc import abstractmethod
from typing import ClassVar, TypeVar

from torch import Tensor, nn

from saccade.caches import KVCache, LayerCache
from saccade.masks import Mask
from saccade.matrix import Matrix
from saccade.positions import Bias
from saccade.positions.token_positions import GivenPositions
from saccade.support.argument_hints import ArgumentHints
from saccade.support.errors import unsupported

M = TypeVar("M", bound="Mechanism")
# The attributes in which a torch module stores its hooks.
_HOOKS: tuple[str, ...] = ("_forward_hooks", "_forward_hooks_with_kwargs", "_forward_hooks_always_called")
_HOOKS += ("_forward_pre_hooks", "_forward_pre_hooks_with_kwargs")


class Mechanism(ArgumentHints, nn.Module):
    """A module that computes an attention matrix from queries and keys. Caches and recordings use this interface.

    Attributes:
        needs_all_keys: whether a weight also depends on the keys between the query and the key. If so, a cache must
            pass the keys of all tokens, in order.
        forecasts_with_cache: whether `saccade.cost` needs a cache of the earlier tokens to forecast a step, because
            which columns the step reads does not follow from the mask.
    """

    needs_all_keys: ClassVar[bool] = False
    forecasts_with_cache: ClassVar[bool] = False

    @property
    def treats_heads_alike(self) -> bool:
        """Whether the matrix depends only on dot products and the mask, in the same way in every head.

        Caches may then pass heads as batch items, and may omit positions unless the mask needs them.
        """
        return False

    def reasons(self, mask: Mask) -> tuple[str, ...]:
        """Return the reasons why the mechanism does not support a mask. The tuple is empty if the mask is supported."""
        return ()

    def new_cache(self, max_len: int | None = None) -> LayerCache:
        """Return an empty cache for this mechanism: by default a `saccade.caches.KVCache`, which fits every mechanism.

        Args:
            max_len: number of tokens to allocate memory for in advance; None to grow as needed.
        """
        return KVCache(max_len)

    def with_bias(self, bias: Tensor | Bias) -> Mechanism:
        """Return a copy of this mechanism for one call, with a bias added to its scores.

        Raises:
            UnsupportedError: the mechanism has no scores, or already has a bias.
        """
        name = type(self).__name__
        raise unsupported("bias", [f"{name} has no scores to add it to"], hint="mechanism=Softmax() adds it")

    def _with_hooks(self, other: M) -> M:
        """Copy the hooks of this mechanism to ``other``, which replaces it for one call, and return ``other``."""
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
        """Return the attention matrix of queries ``[batch, heads, q_len, head_dim]`` and keys."""
