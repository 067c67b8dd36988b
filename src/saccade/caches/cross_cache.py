"""CrossCache: keys and values of a context, computed once."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Self

from torch import Tensor

from saccade.caches.checks import check_dense_mask, check_mechanism, checked_rows
from saccade.caches.layer_cache import LayerCache, MakesMatrix, Traffic
from saccade.caches.memory import usable
from saccade.engine.at_positions import Positions, check_positions
from saccade.errors import type_error, value_error

__all__ = ["CrossCache"]


class CrossCache(LayerCache):
    """What cross-attention remembers: the projected context, from the first call on.

    ``mha(x, context, cache=cache)`` projects the context in the first call only; from then on the context may be left
    out, and if given must have the same shape. Its contents are not compared.

    The cache does not count queries: where they stand matters only to masks and rotations, and is then told with
    ``positions``.

    Example:
        >>> import torch
        >>> from saccade.nn import MultiHeadAttention
        >>> mha, cache = MultiHeadAttention(16, 4, context_dim=8).eval(), CrossCache()
        >>> x, context = torch.randn(1, 3, 16), torch.randn(1, 5, 8)
        >>> first = mha(x[:, :2], context, cache=cache)
        >>> last = mha(x[:, 2:], cache=cache)
        >>> torch.allclose(torch.cat([first, last], 1), mha(x, context), atol=1e-6)
        True
    """

    hands_on_all = True

    def __init__(self) -> None:
        self._key: Tensor | None = None
        self._value: Tensor | None = None
        self._kv_positions: Positions = None
        self._has_been_read, self._is_new = False, False

    @property
    def is_filled(self) -> bool:
        """Whether the context is known."""
        return self._key is not None

    @property
    def length(self) -> int:
        return 0 if self._key is None else self._key.shape[2]

    @property
    def nbytes(self) -> int:
        held = [x for x in (self._key, self._value, self._kv_positions) if isinstance(x, Tensor)]
        return sum(x.untyped_storage().nbytes() for x in held)

    @property
    def key(self) -> Tensor | None:
        """The keys, ``[batch, kv_heads, length, head_dim]``; None before the first call."""
        return self._key

    @property
    def value(self) -> Tensor | None:
        """The values, ``[batch, kv_heads, length, value_dim]``; None before the first call."""
        return self._value

    @property
    def kv_positions(self) -> Positions:
        """Where the tokens of the context stand; None for one by one from 0."""
        return self._kv_positions

    @property
    def traffic(self) -> Traffic:
        held = sum(x.numel() * x.element_size() for x in (self._key, self._value) if x is not None)
        return Traffic(held if self._has_been_read else 0, held if self._is_new else 0)

    def positions(self, q_len: int) -> None:
        """None: the tokens that ask are not those that are remembered."""
        del q_len

    def fill(self, key: Tensor, value: Tensor, *, kv_positions: Positions = None) -> None:
        """Remember a context: ``key [batch, kv_heads, len, head_dim]`` and ``value [batch, kv_heads, len, value_dim]``.

        Raises:
            ValueError: it is filled already, or the shapes do not fit.
        """
        where = "CrossCache.fill"
        for name, x in (("key", key), ("value", value)):
            if not isinstance(x, Tensor):
                raise type_error(where, name, "be a tensor", type(x).__name__)
        if self._key is not None:
            raise value_error(
                where, "cache", "be empty", f"one of {self.length} keys", hint="a new context: a new cache"
            )
        if key.dim() != 4 or value.dim() != 4 or key.shape[:3] != value.shape[:3]:
            rule = "be [batch, kv_heads, len, width], alike but for their widths"
            raise value_error(where, "key and value", rule, f"{list(key.shape)} and {list(value.shape)}")
        check_positions(kv_positions, "kv_positions", key.shape[0], key.shape[2], where)
        # As they are where gradients must reach the context; else copies, so that nothing is shared with the caller.
        self._key, self._value = (x if x.requires_grad else x.clone() for x in (key, value))
        self._kv_positions = kv_positions.clone() if isinstance(kv_positions, Tensor) else kv_positions

    def attend(
        self,
        mechanism: MakesMatrix,
        query: Tensor,
        key: Tensor | None = None,
        value: Tensor | None = None,
        *,
        mask: object = None,
        positions: Positions = None,
        dropout_p: float = 0.0,
    ) -> Tensor:
        """Attend to the context; ``key`` and ``value`` are needed in the first call and ignored by none after it.

        Args:
            mechanism, query, mask, dropout_p: see `LayerCache.attend`.
            key, value: of the context, in the first call (or `fill`); None after that.
            positions: where the queries stand, if the mask asks.

        Raises:
            ValueError: no context yet, or a second one.
        """
        where = "CrossCache.attend"
        check_mechanism(where, mechanism)
        check_dense_mask(where, mask)
        if key is not None and value is not None:
            self.fill(key, value)
        if self._key is None or self._value is None:
            raise value_error(where, "key and value", "be given in the first call", None)
        self._key, self._value = usable(self._key), usable(self._value)
        kv_positions = self._kv_positions
        if positions is not None and kv_positions is None:
            kv_positions = range(self._key.shape[2])
        matrix = mechanism(query, self._key, mask=mask, q_positions=positions, kv_positions=kv_positions)
        out = matrix.matmul(self._value, dropout_p=dropout_p)
        self._has_been_read, self._is_new = True, not self._has_been_read
        return out

    def reorder(self, rows: Tensor | Sequence[int]) -> None:
        index = checked_rows("CrossCache.reorder", rows, None if self._key is None else self._key.shape[0])
        if self._key is None or self._value is None:
            return
        index = index.to(self._key.device)
        self._key, self._value = self._key[index], self._value[index]
        if isinstance(self._kv_positions, Tensor) and self._kv_positions.dim() == 2 and len(self._kv_positions) > 1:
            self._kv_positions = self._kv_positions[index]

    def crop(self, length: int) -> None:
        """Nothing to forget: the context stays, whatever is taken back of the tokens that ask."""
        del length

    def fork(self) -> Self:
        """A copy that shares the context, to which neither writes."""
        other = type(self)()
        other._key, other._value, other._kv_positions = self._key, self._value, self._kv_positions
        return other

    def __repr__(self) -> str:
        return f"CrossCache(length={self.length}, nbytes={self.nbytes})"
