"""LayerCache: the protocol that every cache of a layer speaks."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import ClassVar, NamedTuple, Protocol, Self

from torch import Tensor

from saccade.engine.at_positions import Positions
from saccade.matrix import Matrix

__all__ = ["LayerCache", "MakesMatrix", "Traffic"]


class MakesMatrix(Protocol):
    """What a cache needs of a mechanism: to be called. It knows no mechanism, one is passed in."""

    def __call__(
        self, query: Tensor, key: Tensor, *, mask: object, q_positions: Positions, kv_positions: Positions
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


class LayerCache(ABC):
    """What one attention layer remembers. An object of its own, handed from call to call; no module holds one.

    The law of every cache: a prefill, then extend and decode steps of any sizes, equal the full run, for every causal
    mask. A cache that forgets says which other run it equals.

    Attributes:
        hands_on_all: whether the mechanism is handed the keys of all tokens so far, in their order. False unless a
            class says so.
    """

    hands_on_all: ClassVar[bool] = False

    @property
    @abstractmethod
    def length(self) -> int:
        """Columns held: tokens of a batch item, padding included."""

    @property
    @abstractmethod
    def nbytes(self) -> int:
        """Bytes of memory held, spare room included; memory shared with a fork counts in both."""

    @property
    @abstractmethod
    def traffic(self) -> Traffic:
        """What the last `attend` read and appended; nothing before the first."""

    @abstractmethod
    def positions(self, q_len: int) -> Positions:
        """Where the next ``q_len`` tokens will stand: a range, or int64 ``[batch, q_len]`` where items differ."""

    @abstractmethod
    def attend(
        self,
        mechanism: MakesMatrix,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        *,
        mask: object = None,
        positions: Positions = None,
        dropout_p: float = 0.0,
    ) -> Tensor:
        """Remember new keys and values, and attend to all that is remembered.

        Args:
            mechanism: makes the matrix of queries and keys.
            query: ``[batch, heads, q_len, head_dim]``.
            key: ``[batch, kv_heads, q_len, head_dim]``, of the new tokens only.
            value: ``[batch, kv_heads, q_len, value_dim]``.
            mask: who may attend to whom, read at positions.
            positions: where the new tokens stand; `positions` of the cache when None; -1 means no token.
            dropout_p: of the weights in this product.

        Returns:
            ``[batch, heads, q_len, value_dim]``. If the call fails, the cache is as it was before.
        """

    @abstractmethod
    def reorder(self, rows: Tensor | Sequence[int]) -> None:
        """Keep these batch items, in this order; they may repeat, and be fewer or more than before."""

    @abstractmethod
    def crop(self, length: int) -> None:
        """Forget all columns but the first ``length``."""

    @abstractmethod
    def fork(self) -> Self:
        """An independent copy: what happens to one does not show in the other."""
