"""IndexedCache: stores all keys and values, and the index keys that a scorer uses to rank them."""

from __future__ import annotations

from typing import Any, ClassVar

from torch import Tensor

from saccade.caches.call_arguments import Call, check_readable
from saccade.caches.files.file_contents import Contents
from saccade.caches.kv_cache import KVCache
from saccade.caches.state_tensors import Leaf
from saccade.matrix import AttentionMatrix
from saccade.matrix.block_sparse import SelectedBlocks
from saccade.support.errors import unsupported
from saccade.support.torch_modes import has_values


class IndexedCache(KVCache):
    """A cache of all keys and values, and of a scorer's index keys. `TopK` gives the same result as without a cache.

    The mechanism passed to each call contains the index keys of the new tokens: ``TopK(LightningIndexer(q, k, w), …)``.
    The cache replaces them by the index keys of all tokens so far.

    Args:
        max_len: as for `KVCache`.

    Raises:
        UnsupportedError: the mechanism has no index keys, or `fill` is called, which cannot pass index keys.

    Cost: as for a `KVCache`, plus ``batch * columns * dim`` elements for index keys.

    Example:
        >>> import torch
        >>> from saccade import masks, mechanisms
        >>> from saccade.scorers import LightningIndexer
        >>> cache = IndexedCache()
        >>> for _ in range(2):
        ...     q, k, v = (torch.randn(1, 2, 5, 8) for _ in range(3))
        ...     scorer = LightningIndexer(torch.randn(1, 4, 5, 6), torch.randn(1, 1, 5, 6), torch.ones(1, 4, 5))
        ...     out = cache.attend(mechanisms.TopK(scorer, 3), q, k, v, mask=masks.Causal())
        >>> cache.index_key.shape
        torch.Size([1, 1, 10, 6])
    """

    leaves: ClassVar[tuple[Leaf, ...]] = (*KVCache.leaves, Leaf("index_key", "batch one columns dim"))

    @property
    def index_key(self) -> Tensor | None:
        """Index keys, ``[batch, 1, length, dim]``, as a read-only view; None before the first call."""
        return self._state["index_key"][:, :, : self.length] if self._state else None

    def advance(self, call: Call) -> Tensor:
        mechanism: Any = call.mechanism
        new = getattr(mechanism, "index_key", None)
        if new is None:
            reason = "it has no index keys"
            hint = "mechanisms.TopK(scorers.LightningIndexer(...), k) has them; KVCache() needs none"
            raise unsupported(type(mechanism).__name__, [reason], hint=hint)
        check_readable(call.query, call.key, new)
        known = self._write_columns("index_key", len(self._tokens), new)
        out = super().advance(call._replace(mechanism=mechanism.with_index_key(known)))
        self._traffic = self._traffic._replace(bytes_read=self._traffic.bytes_read + known.nbytes)
        return out

    def _bytes_read(self, matrix: AttentionMatrix, stored: int) -> int:
        rule, (_, groups, kv_len, _) = matrix.inputs.rule, matrix.inputs.key.shape
        if not isinstance(rule, SelectedBlocks):
            return super()._bytes_read(matrix, stored)
        if not has_values(rule.index):
            return stored  # an upper bound, since the selected keys are unknown
        return stored * rule.keys_read(groups, kv_len) // (len(rule.index) * groups * kv_len)

    def fill(self, key: Tensor, value: Tensor, *, positions: range | Tensor | None = None) -> None:
        reason = "index keys would be missing"
        raise unsupported("a prefix", [reason], hint="attend to the prefix, or fork a cache")

    def restore(self, contents: Contents) -> None:
        super().restore(contents)
        if self._state:
            self._write_columns("index_key", 0, self._state.pop("index_key"))
