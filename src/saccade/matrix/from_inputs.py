"""Base of the matrices of weights and of scores of softmax attention, which share their inputs."""

from __future__ import annotations

from abc import abstractmethod
from typing import Any, Self, cast

import torch
from torch import Tensor
from torch.utils._pytree import tree_flatten, tree_unflatten

from saccade.engine.inputs import AttentionInputs
from saccade.engine.samples import are_mapped, of_all_samples
from saccade.engine.tiles.tile_scores import positions
from saccade.matrix.indexing import Index
from saccade.matrix.matrix import Matrix
from saccade.plan import ColumnRange, Ranges, Tile
from saccade.statistics.sparse import DENSE_LIMIT
from saccade.statistics.statistic import Statistic
from saccade.support.errors import unsupported


class OfInputs(Matrix):
    """A matrix that is computed from checked queries, keys and a rule."""

    inputs: AttentionInputs

    @property
    def shape(self) -> tuple[int, int, int, int]:
        return self.inputs.shape

    @property
    def dtype(self) -> torch.dtype:
        return self.inputs.dtype

    @property
    def device(self) -> torch.device:
        return self.inputs.query.device

    @property
    def kv_heads(self) -> int:
        return self.inputs.key.shape[1]

    def positions(self, rows: range, columns: Ranges) -> tuple[Tensor, Tensor]:
        batch, heads, _, _ = self.shape
        strips = tuple(ColumnRange(span, True) for span in columns)
        inputs = self.inputs
        return positions(inputs, Tile(slice(0, batch), slice(0, heads), rows, strips, inputs.rule))

    # Under vmap nothing can be read, nor written in place: all samples are then one batch.

    @abstractmethod
    def _of(self, inputs: AttentionInputs) -> Self:
        """Return the same matrix of other ingredients."""

    def compute(self, *statistics: Statistic[Any, Any]) -> tuple[Any, ...]:
        if not are_mapped(self.inputs):
            return super().compute(*statistics)
        made: list[Any] = []

        def question(inputs: AttentionInputs) -> tuple[Tensor, ...]:
            tensors, spec = tree_flatten(self._of(inputs).compute(*statistics))
            for x in tensors:
                if not isinstance(x, Tensor) or x.shape[:1] != (inputs.shape[0],):
                    reason = "an answer is no tensor with the batch as its first axis"
                    raise unsupported("vmap", [reason], hint="put the mapped axis into the batch")
            made.append(spec)
            return tuple(tensors)

        with torch.no_grad():
            tensors = of_all_samples(self.inputs, question)
        return cast("tuple[Any, ...]", tree_unflatten(tensors, made[-1]))

    def to_dense(self, *, limit: int = DENSE_LIMIT) -> Tensor:
        if not are_mapped(self.inputs):
            return super().to_dense(limit=limit)
        return of_all_samples(self.inputs, lambda inputs: (self._of(inputs).to_dense(limit=limit),))[0]

    def rmatmul(self, x: Tensor) -> Tensor:
        if not are_mapped(self.inputs, x):
            return super().rmatmul(x)
        return of_all_samples(self.inputs, lambda inputs, own: (self._of(inputs).rmatmul(own),), x)[0]

    def __getitem__(self, index: Index) -> Tensor:
        return self.to_dense()[index] if are_mapped(self.inputs) else super().__getitem__(index)
