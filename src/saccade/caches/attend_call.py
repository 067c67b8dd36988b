"""Call: what a cache is asked, checked; and what it needs of those who ask."""

from __future__ import annotations

from typing import NamedTuple, Protocol

import torch
from torch import Tensor

from saccade.masks import Causal, Mask
from saccade.matrix import Matrix
from saccade.positions.token_positions import GivenPositions, Positions

__all__ = ["Call", "Like", "MakesMatrix", "Traffic"]


class MakesMatrix(Protocol):
    """What a cache needs of a mechanism: to be called. It knows no mechanism, one is passed in.

    One that declares ``treats_heads_alike``, as `saccade.mechanisms.Mechanism` does, may be faster.
    """

    def __call__(
        self, query: Tensor, key: Tensor, *, mask: object, q_positions: GivenPositions, kv_positions: GivenPositions
    ) -> Matrix:
        """The matrix of these queries and keys."""
        ...


class Traffic(NamedTuple):
    """Bytes of keys and values that one call moved.

    Args:
        bytes_read: of the keys that some query needs, with their values, each counted once.
        bytes_appended: of the new ones.
    """

    bytes_read: int
    bytes_appended: int


class Call(NamedTuple):
    """One call of `LayerCache.attend`, checked.

    Args:
        mechanism, query, key, value, dropout_p: as they were given.
        mask: the rule on positions; None for no rule.
        positions: where the new tokens stand.
        kv_positions: where all tokens so far stand, in a cache that keeps their order; else the new ones.
    """

    mechanism: MakesMatrix
    query: Tensor
    key: Tensor
    value: Tensor
    mask: Mask | None
    positions: Positions
    kv_positions: Positions
    dropout_p: float

    @property
    def table(self) -> Tensor:
        """Where the new tokens stand, int64 ``[batch | 1, q_len]`` on the device of the keys."""
        return self.positions.on(self.key.device)

    @property
    def treats_heads_alike(self) -> bool:
        """Whether the mechanism declares that products and the mask alone matter to it, the same in every head."""
        return getattr(self.mechanism, "treats_heads_alike", False)

    @property
    def sees_all_before(self) -> bool:
        """Whether a query sees every token that came before it."""
        return self.mask is None or type(self.mask) is Causal

    @property
    def tells_heads_apart(self) -> bool:
        """Whether the rule may say something else for another head or batch item."""
        return self.mask is not None and (self.mask.shape != (1, 1) or self.mask.asks_functions)

    @property
    def needs_graph(self) -> bool:
        """Whether autograd will record the product."""
        if not torch.is_grad_enabled():
            return False
        if any(x.requires_grad for x in (self.query, self.key, self.value)):
            return True
        module = self.mechanism
        return isinstance(module, torch.nn.Module) and any(x.requires_grad for x in module.parameters())

    def product(self, matrix: Matrix, value: Tensor) -> tuple[Tensor]:
        """The product with values, as the only result."""
        return (matrix.matmul(value, dropout_p=self.dropout_p),)


class Like(NamedTuple):
    """What keys and values are like: those that come must be like those held."""

    batch: int
    kv_heads: int
    head_dim: int
    value_dim: int
    dtype: torch.dtype
    device: torch.device

    @classmethod
    def of(cls, key: Tensor, value: Tensor) -> Like:
        """Of keys and values that fit together."""
        batch, kv_heads, _, head_dim = key.shape
        return cls(batch, kv_heads, head_dim, value.shape[3], key.dtype, key.device)
