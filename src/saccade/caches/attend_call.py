"""Call: one checked call of a cache, and what a cache requires of a mechanism."""

from __future__ import annotations

from typing import NamedTuple, Protocol

import torch
from torch import Tensor

from saccade.masks import Causal, Mask
from saccade.matrix import Matrix
from saccade.positions.token_positions import GivenPositions, Positions


class MakesMatrix(Protocol):
    """A mechanism as a cache sees it: a function from queries and keys to a matrix.

    One that declares ``treats_heads_alike``, as `saccade.mechanisms.Mechanism` does, may be faster.
    """

    def __call__(
        self, query: Tensor, key: Tensor, *, mask: object, q_positions: GivenPositions, kv_positions: GivenPositions
    ) -> Matrix:
        """Return the matrix of these queries and keys."""
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
        mechanism, query, key, value, dropout_p: as passed.
        mask: on positions; None for no mask.
        positions: of the new tokens.
        kv_positions: of all tokens so far, in a cache that keeps their order; else of the new ones.
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
        """The positions of the new tokens, int64 ``[batch | 1, q_len]`` on the device of the keys."""
        return self.positions.on(self.key.device)

    @property
    def treats_heads_alike(self) -> bool:
        """True if the mechanism declares that its result depends on dot products and the mask alone, alike in every
        head.
        """
        return getattr(self.mechanism, "treats_heads_alike", False)

    @property
    def sees_all_before(self) -> bool:
        """True if a query sees every token before it."""
        return self.mask is None or type(self.mask) is Causal

    @property
    def tells_heads_apart(self) -> bool:
        """True if the mask may differ between heads or batch items."""
        return self.mask is not None and (self.mask.shape != (1, 1) or self.mask.asks_functions)

    @property
    def needs_graph(self) -> bool:
        """True if autograd will record the product."""
        if not torch.is_grad_enabled():
            return False
        if any(x.requires_grad for x in (self.query, self.key, self.value)):
            return True
        module = self.mechanism
        return isinstance(module, torch.nn.Module) and any(x.requires_grad for x in module.parameters())

    def product(self, matrix: Matrix, value: Tensor) -> tuple[Tensor]:
        """Return the product with values, as a tuple of one."""
        return (matrix.matmul(value, dropout_p=self.dropout_p),)


class KeyValueSpec(NamedTuple):
    """Sizes, dtype and device of keys and values: new ones must match those stored."""

    batch: int
    kv_heads: int
    head_dim: int
    value_dim: int
    dtype: torch.dtype
    device: torch.device

    @classmethod
    def of(cls, key: Tensor, value: Tensor) -> KeyValueSpec:
        """Return the spec of keys and values that fit together."""
        batch, kv_heads, _, head_dim = key.shape
        return cls(batch, kv_heads, head_dim, value.shape[3], key.dtype, key.device)
