"""SharedSelection: the keys that the indexer of one layer selects, for that layer and later ones."""

from __future__ import annotations

from torch import Tensor

from saccade.engine.inputs import AttentionInputs
from saccade.mechanisms import Softmax, TopK
from saccade.mechanisms.selecting import Selecting
from saccade.scorers import LightningIndexer
from saccade.support.errors import value_error


class SharedSelection:
    """The keys that a layer selects in one call, for later layers that attend to the same keys."""

    def __init__(self) -> None:
        self.k = 0  # 0 until the layer with the indexer has run
        self.index: Tensor | None = None
        self._kv_len = 0

    def select(self, softmax: Softmax, scorer: LightningIndexer, k: int) -> Selecting:
        """Return the mechanism that replaces a layer's softmax for one call, selects keys and stores the selection."""
        self.k, self.index = k, None
        return softmax._with_hooks(_StoringTopK(scorer, k, softmax, self))

    def reuse(self, softmax: Softmax) -> Selecting:
        """Return the mechanism that replaces the softmax of a later layer for one call and reads the stored selection.

        Raises:
            ValueError: no layer has selected keys.
        """
        if not self.k:
            rule, hint = "contain the selection of an earlier layer", "a DecoderStack passes it on"
            raise value_error("shared", rule, "none", hint=hint)
        return softmax._with_hooks(_StoredTopK(softmax, self))

    def store(self, index: Tensor | None, kv_len: int) -> None:
        """Store the indices of the keys selected from ``kv_len`` keys; None in a dry run, which selects none."""
        self.index, self._kv_len = index, kv_len

    def read(self, q_len: int, kv_len: int) -> Tensor | None:
        """Return the indices of the selected keys; None in a dry run.

        Raises:
            ValueError: they were selected for other numbers of queries or keys.
        """
        stored = q_len if self.index is None else self.index.shape[2], self._kv_len
        if stored != (q_len, kv_len):
            rule, hint = "have as many queries and keys as the layer that selects", "use the caches of a stack together"
            raise value_error("call", rule, f"{q_len} queries and {kv_len} keys", hint=hint)
        return self.index


class _StoringTopK(TopK):
    """A `TopK` for one call, which stores its selection for later layers."""

    def __init__(self, scorer: LightningIndexer, k: int, softmax: Softmax, shared: SharedSelection):
        super().__init__(scorer, k, softmax=softmax)
        self._shared = shared

    def with_index_key(self, index_key: Tensor) -> TopK:
        assert isinstance(self.scorer, LightningIndexer)
        scorer = self.scorer.with_index_key(index_key)
        return self._with_hooks(_StoringTopK(scorer, self.k, self.softmax, self._shared))

    def _index(self, inputs: AttentionInputs, query: Tensor, key: Tensor) -> Tensor | None:
        index = super()._index(inputs, query, key)
        self._shared.store(index, key.shape[2])
        return index


class _StoredTopK(Selecting):
    """A mechanism for one call, which attends to the keys that an earlier layer has selected."""

    def __init__(self, softmax: Softmax, shared: SharedSelection):
        super().__init__(shared.k, 1, softmax)
        self._shared = shared

    def _index(self, inputs: AttentionInputs, query: Tensor, key: Tensor) -> Tensor | None:
        return self._shared.read(query.shape[2], key.shape[2])
