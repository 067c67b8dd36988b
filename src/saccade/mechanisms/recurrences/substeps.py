"""SubstepMatrix: the lazy matrix of a recurrence that updates its state in several substeps for each token."""

from __future__ import annotations

import copy
import dataclasses
from collections.abc import Hashable, Iterator, Sequence
from functools import cached_property
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from saccade.caches.recurrent import Memory
from saccade.matrix import Block, Matrix
from saccade.matrix.uniform_matrix import UniformMatrix
from saccade.mechanisms.features.mask_support import Visible
from saccade.mechanisms.linear_time import LinearTimeMatrix
from saccade.mechanisms.recurrences.recurrence_matrix import RecurrenceMatrix, column_sums, spans_of
from saccade.statistics.statistic import MatrixInfo, Statistic
from saccade.support.errors import value_error


class SubstepMatrix(LinearTimeMatrix):
    """The lazy matrix of a recurrence with several substeps for each token. Its rows and columns are tokens.

    One recurrence runs over all substeps. A query reads the state after the last substep of its token. Values are
    written either in the last substep only, or in every substep. In the second case, the matrix has a separate head for
    each substep, which weights the values of that substep. The output of a recurrence head is then the sum over the
    heads of its substeps; `total` computes it in one pass.

    Args:
        whole: the recurrence over all substeps, ``[batch, heads, q_len * steps, kv_len * steps]``.
        visible: the mask of the tokens.
        steps: number of substeps for each token.
        writers: number of substeps that write values: 1 or ``steps``. The matrix has ``heads * writers`` heads: for
            each head of the recurrence, one for each of these substeps.

    Cost: ``writers`` passes of a recurrence over ``steps`` times as many tokens; `total` and `advance` take one pass.
    """

    is_stochastic = False

    def __init__(self, whole: RecurrenceMatrix, visible: Visible, steps: int, writers: int):
        batch, heads, q_len, kv_len = whole.shape
        shape = (batch, heads * writers, q_len // steps, kv_len // steps)
        super().__init__(shape, whole.kv_heads * writers, dtype=whole.dtype, device=whole.device)
        self.whole, self.visible, self.steps, self.writers = whole, visible, steps, writers
        self.source: Hashable = whole.source
        self._heads = [head for head in range(heads) for _ in range(writers)]
        self._substeps = [steps - writers + step for _ in range(heads) for step in range(writers)]

    @property
    def key(self) -> Tensor | None:
        """Keys of all substeps up to the last query, ``[batch, heads, len * steps, head_dim]``."""
        return self.whole.key

    def of_heads(self, heads: Sequence[int]) -> SubstepMatrix:
        """Return the matrix with only the given heads, in the given order."""
        part, (batch, _, q_len, kv_len) = copy.copy(self), self.shape
        part.__dict__.pop("_per_head", None)
        part.shape, part.kv_heads = (batch, len(heads), q_len, kv_len), len(heads)
        part._heads, part._substeps = ([indices[head] for head in heads] for indices in (self._heads, self._substeps))
        return part

    def below(self, earlier: SubstepMatrix) -> SubstepMatrix | None:
        """Return a matrix with the rows of an earlier call above these rows, or None; see `RecurrenceMatrix.below`."""
        whole = self.whole.below(earlier.whole)
        if whole is None or self._heads != earlier._heads or self._substeps != earlier._substeps:
            return None
        joined = copy.copy(self)
        joined.__dict__.pop("_per_head", None)
        joined.whole, joined.shape = whole, (*self.shape[:2], whole.shape[2] // self.steps, self.shape[3])
        rows = torch.cat([earlier.visible.q_positions, self.visible.q_positions], 1)
        joined.visible = dataclasses.replace(self.visible, offset=earlier.visible.offset, q_positions=rows)
        return joined

    def rmatmul(self, x: Tensor) -> Tensor:
        """Return ``A.mT @ x`` in linear time, with a pass from the last substep to the first; see `Matrix.rmatmul`."""
        x = self._operand(x, "x", self.shape[1], self.shape[2])
        sums = self._per_head.rmatmul(to_last_substep(x, self.steps)).mT.unflatten(3, (-1, self.steps))
        return self._select_substeps(sums).mT

    def advance(self, value: Tensor, memory: Memory | None) -> tuple[Tensor, Memory]:
        """Return the output for new tokens, summed over the substeps, and the state after them.

        Args:
            value: ``[batch, kv_heads, kv_len, value_dim]`` with the key heads of the recurrence. If every substep
                writes, the values of all substeps side by side, ``[..., steps * value_dim]``.
            memory: as in `RecurrenceMatrix.advance`.
        """
        out, memory = self.whole.advance(self._expand_values(value), memory)
        return out[:, :, self.steps - 1 :: self.steps], memory

    def total(self, value: Tensor) -> Tensor:
        """Return the output, ``[batch, heads, q_len, value_dim]``, summed over the substeps.

        Args:
            value: as in `advance`.
        """
        return self.whole.matmul(self._expand_values(value))[:, :, self.steps - 1 :: self.steps]

    def _expand_values(self, value: Tensor) -> Tensor:
        """Expand values to substeps, ``[batch, kv_heads, kv_len * steps, value_dim]``: 0 where nothing is written."""
        if value.dim() != 4 or value.shape[3] % self.writers:
            rule = f"have shape [batch, kv_heads, kv_len, {self.writers} * value_dim], those of all steps side by side"
            raise value_error("value", rule, list(value.shape))
        each = value.unflatten(3, (self.writers, value.shape[3] // self.writers))
        return F.pad(each, (0, 0, self.steps - self.writers, 0)).flatten(2, 3)

    def uniform(self) -> Matrix:
        return UniformMatrix(self, self.visible.in_block)

    def blocks(self, batch: int | None = None, head: int | None = None, rows: range | None = None) -> Iterator[Block]:
        self._check_part(batch, head, rows)
        n = self.steps
        for b, heads, span in spans_of(self, batch, head, rows):
            steps = range(span.start * n + n - 1, span.stop * n, n)
            weights = self._select_substeps(self._per_head.weights_of(b, heads, steps).unflatten(3, (-1, n)), heads)
            yield Block(slice(b, b + 1), heads, span, (range(weights.shape[3]),), weights)

    def _compute_by_sweep(self, statistics: Sequence[Statistic[Any, Any]], info: MatrixInfo) -> dict[int, Any]:
        return column_sums(self, statistics)

    @cached_property
    def _per_head(self) -> RecurrenceMatrix:
        """The recurrence over all substeps, with its heads repeated to match the heads of this matrix."""
        return self.whole if self._heads == list(range(self.whole.shape[1])) else self.whole.of_heads(self._heads)

    def _times(self, value: Tensor) -> Tensor:
        per_head = self._per_head
        if per_head is not self.whole:  # each head has a separate key head
            each = self.whole.shape[1] // max(1, self.whole.kv_heads)
            if self.kv_heads != self.shape[1]:
                value = value.unflatten(1, (-1, self.writers)).repeat_interleave(each, 1).flatten(1, 2)
        heads = value.shape[1]
        substeps = torch.tensor(self._substeps[:heads], device=value.device)
        is_written = F.one_hot(substeps, self.steps).bool()[:, None, :, None]
        out = per_head.matmul(torch.where(is_written, value[:, :, :, None], 0.0).flatten(2, 3))
        return out[:, :, self.steps - 1 :: self.steps]

    def _select_substeps(self, x: Tensor, heads: slice = slice(None)) -> Tensor:
        """Select each head's substep of ``x [batch, heads, any, len, steps]``; return ``[batch, heads, any, len]``."""
        substeps = torch.tensor(self._substeps[heads], device=x.device)[:, None, None, None]
        return x.gather(4, substeps.expand(*x.shape[:4], 1)).squeeze(4)


def to_last_substep(x: Tensor, steps: int) -> Tensor:
    """Expand tokens ``[batch, heads, len, width]`` to substeps.

    Each token's entry goes to its last substep; the others are 0.
    """
    return F.pad(x[:, :, :, None], (0, 0, steps - 1, 0)).flatten(2, 3)


def to_first_substep(x: Tensor, steps: int) -> Tensor:
    """Expand tokens ``[batch, heads, len, width]`` to substeps.

    Each token's entry goes to its first substep; the others are 0.
    """
    return F.pad(x[:, :, :, None], (0, 0, 0, steps - 1)).flatten(2, 3)


def expand_mask(visible: Visible, steps: int) -> Visible:
    """Expand the mask of tokens to their substeps. Each substep inherits its token's position and document."""

    def repeat(x: Tensor | None) -> Tensor | None:
        return None if x is None else x.repeat_interleave(steps, 1)

    return dataclasses.replace(
        visible,
        offset=None if visible.offset is None else visible.offset * steps,
        q_positions=visible.q_positions.repeat_interleave(steps, 1),
        kv_positions=visible.kv_positions.repeat_interleave(steps, 1),
        hidden_rows=repeat(visible.hidden_rows),
        hidden_keys=repeat(visible.hidden_keys),
        q_documents=repeat(visible.q_documents),
        kv_documents=repeat(visible.kv_documents),
    )
