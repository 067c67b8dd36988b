"""One checked call of a cache, `Call`, and the interface that a cache requires of a mechanism."""

from __future__ import annotations

from typing import NamedTuple, Protocol

import torch
from torch import Tensor

from saccade.masks import Causal, Mask
from saccade.matrix import Matrix
from saccade.positions.token_positions import GivenPositions, Positions


class MakesMatrix(Protocol):
    """The interface of a mechanism for a cache: a function from queries and keys to an attention matrix.

    One that declares ``treats_heads_alike``, as `saccade.mechanisms.Mechanism` does, may be faster.
    """

    def __call__(
        self, query: Tensor, key: Tensor, *, mask: object, q_positions: GivenPositions, kv_positions: GivenPositions
    ) -> Matrix:
        """Return the attention matrix of queries and keys."""
        ...


class Traffic(NamedTuple):
    """The number of bytes of keys and values that one cache call read and appended.

    Args:
        bytes_read: bytes of the keys that some query needs, and of their values, each counted once.
        bytes_appended: bytes of the new keys and values.
    """

    bytes_read: int
    bytes_appended: int


class Call(NamedTuple):
    """The checked arguments of one call of `LayerCache.attend`.

    Args:
        mechanism, query, key, value, dropout_p: the arguments of the call.
        mask: the mask, evaluated at positions; None for no mask.
        positions: positions of the new tokens.
        kv_positions: positions of all tokens so far if the cache keeps their order, else of the new ones.
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
        """The positions of the new tokens, int64 ``[batch | 1, q_len]``, on the device of the keys."""
        return self.positions.on(self.key.device)

    @property
    def treats_heads_alike(self) -> bool:
        """True if the mechanism declares that its result depends on dot products and the mask alone, alike in every
        head.
        """
        return getattr(self.mechanism, "treats_heads_alike", False)

    @property
    def sees_all_before(self) -> bool:
        """True if the mask lets every new query attend to every earlier token."""
        return self.mask is None or type(self.mask) is Causal

    @property
    def tells_heads_apart(self) -> bool:
        """True if the mask may differ between heads or batch items."""
        return self.mask is not None and (self.mask.shape != (1, 1) or self.mask.asks_functions)

    @property
    def needs_graph(self) -> bool:
        """True if autograd will record this attention call."""
        if not torch.is_grad_enabled():
            return False
        if any(x.requires_grad for x in (self.query, self.key, self.value)):
            return True
        module = self.mechanism
        return isinstance(module, torch.nn.Module) and any(x.requires_grad for x in module.parameters())

    def product(self, matrix: Matrix, value: Tensor) -> tuple[Tensor]:
        """Return the attention output, ``matrix @ value``, as a tuple of one tensor."""
        return (matrix.matmul(value, dropout_p=self.dropout_p),)


class KeyValueSpec(NamedTuple):
    """The sizes, dtype and device of cached keys and values; new ones must match them."""

    batch: int
    kv_heads: int
    head_dim: int
    value_dim: int
    dtype: torch.dtype
    device: torch.device

    @classmethod
    def of(cls, key: Tensor, value: Tensor) -> KeyValueSpec:
        """Return the spec of new keys and values; raise if they do not fit together."""
        batch, kv_heads, _, head_dim = key.shape
        return cls(batch, kv_heads, head_dim, value.shape[3], key.dtype, key.device)
