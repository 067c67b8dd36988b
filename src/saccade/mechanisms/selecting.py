"""Selecting: the base class of mechanisms whose softmax covers only the keys selected for each query."""

from __future__ import annotations

from abc import abstractmethod

import torch
from torch import Tensor

from saccade.engine.inputs import AttentionInputs
from saccade.masks import as_mask, sliding_window
from saccade.matrix import AttentionMatrix
from saccade.matrix.block_sparse import reads_only_selected, restrict_to_blocks
from saccade.mechanisms.base import Mechanism
from saccade.mechanisms.readable_tensors import is_dry_run
from saccade.mechanisms.softmax import Softmax
from saccade.positions.token_positions import GivenPositions
from saccade.support.errors import hidden_by_vmap
from saccade.support.torch_modes import CHOSEN_BY_VALUES, is_mapped, is_tracing, outside_graph, without_autocast


class Selecting(Mechanism):
    """The base class of mechanisms whose exact softmax covers only selected keys, or blocks of keys.

    Subclasses define `_index`, which selects. It is not called if no query has more than ``k`` blocks of keys.

    Args:
        k: largest number of keys, or of blocks, that a query reads.
        block_size: number of keys in a block.
        softmax: the softmax over the selected keys. Its hooks do not run, since its matrix has too many keys.
    """

    def __init__(self, k: int, block_size: int, softmax: Softmax):
        super().__init__()
        self.k, self.block_size, self.softmax = k, block_size, softmax

    def forward(
        self,
        query: Tensor,
        key: Tensor,
        *,
        mask: object = None,
        q_positions: GivenPositions = None,
        kv_positions: GivenPositions = None,
    ) -> AttentionMatrix:
        if is_tracing():
            return outside_graph(self._matrix_of, CHOSEN_BY_VALUES)(query, key, mask, q_positions, kv_positions)
        return self._matrix_of(query, key, mask, q_positions, kv_positions)

    @abstractmethod
    def _index(self, inputs: AttentionInputs, query: Tensor, key: Tensor) -> Tensor | None:
        """Return the selected blocks, in the form of `saccade.engine.block_sparse.selection.select_blocks`.

        The result is None in a dry run, which has no values to select by.
        """

    def _matrix_of(
        self, query: Tensor, key: Tensor, mask: object, q_positions: GivenPositions, kv_positions: GivenPositions
    ) -> AttentionMatrix:
        """Return the softmax matrix, restricted to the selected keys if any query has more than ``k`` blocks."""
        matrix = self.softmax.forward(query, key, mask=mask, q_positions=q_positions, kv_positions=kv_positions)
        if -(-key.shape[2] // self.block_size) <= self.k or 0 in matrix.shape:
            return matrix
        if is_mapped(query) or is_mapped(key):
            raise hidden_by_vmap("queries and keys")
        with torch.no_grad(), without_autocast(query.device):
            index = self._index(matrix.inputs.current(), query, key)
        if index is not None:
            return restrict_to_blocks(matrix, index, self.block_size)
        if not reads_only_selected(matrix.inputs, 1, self.k, self.block_size):
            return matrix
        # Any selection reads as many pairs as the last keys.
        last = sliding_window(self.k * self.block_size)
        mask = last if mask is None else as_mask(mask, matrix.shape) & last
        return self.softmax.forward(query, key, mask=mask, q_positions=q_positions, kv_positions=kv_positions)


def has_no_values(x: Tensor) -> bool:
    """Return whether ``x`` has no values to select keys by, because the call only forecasts its cost."""
    return x.device.type == "meta" or is_dry_run()
