"""SubstepMatrix: the lazy matrix of a recurrence that updates its state in several steps for each token."""

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
    """A recurrence with several steps for each token, as a lazy matrix of tokens.

    The steps run as tokens of one recurrence. Queries read after the last step of their token. Values are written in
    the last step only, or in every step. In the second case the matrix has a head for each step, whose values are those
    of this step, so that rows and columns are tokens; the output of a head is then the sum of those of its steps, which
    `total` computes in one pass.

    Args:
        whole: the recurrence of all steps, ``[batch, heads, q_len * steps, kv_len * steps]``.
        visible: the mask of the tokens.
        steps: number of steps for each token.
        writers: number of steps that write values: 1 or ``steps``. The matrix has ``heads * writers`` heads, those of
            one head of the recurrence in a row.

    Cost: as for a recurrence of ``steps`` times as many tokens, ``writers`` times; `total` and `advance` take one pass.
    """

    is_stochastic = False

    def __init__(self, whole: RecurrenceMatrix, visible: Visible, steps: int, writers: int):
        batch, heads, q_len, kv_len = whole.shape
        shape = (batch, heads * writers, q_len // steps, kv_len // steps)
        super().__init__(shape, whole.kv_heads * writers, dtype=whole.dtype, device=whole.device)
        self.whole, self.visible, self.steps, self.writers = whole, visible, steps, writers
        self.source: Hashable = whole.source
        self._heads = [head for head in range(heads) for _ in range(writers)]
        self._places = [steps - writers + step for _ in range(heads) for step in range(writers)]

    @property
    def key(self) -> Tensor | None:
        """Keys of all steps up to the last query, ``[batch, heads, len * steps, head_dim]``."""
        return self.whole.key

    def of_heads(self, heads: Sequence[int]) -> SubstepMatrix:
        """Return the matrix with only the listed heads, in the order of the list."""
        part, (batch, _, q_len, kv_len) = copy.copy(self), self.shape
        part.__dict__.pop("_parts", None)
        part.shape, part.kv_heads = (batch, len(heads), q_len, kv_len), len(heads)
        part._heads, part._places = ([own[head] for head in heads] for own in (self._heads, self._places))
        return part

    def below(self, earlier: SubstepMatrix) -> SubstepMatrix | None:
        """Return one matrix with the rows of an earlier call above these, or None; see `RecurrenceMatrix.below`."""
        whole = self.whole.below(earlier.whole)
        if whole is None or self._heads != earlier._heads or self._places != earlier._places:
            return None
        joined = copy.copy(self)
        joined.__dict__.pop("_parts", None)
        joined.whole, joined.shape = whole, (*self.shape[:2], whole.shape[2] // self.steps, self.shape[3])
        rows = torch.cat([earlier.visible.q_positions, self.visible.q_positions], 1)
        joined.visible = dataclasses.replace(self.visible, offset=earlier.visible.offset, q_positions=rows)
        return joined

    def rmatmul(self, x: Tensor) -> Tensor:
        """Return ``A.mT @ x`` in linear time, by a pass from the last step to the first; see `Matrix.rmatmul`."""
        x = self._operand(x, "x", self.shape[1], self.shape[2])
        sums = self._parts.rmatmul(last_of(x, self.steps)).mT.unflatten(3, (-1, self.steps))
        return self._own(sums).mT

    def advance(self, value: Tensor, memory: Memory | None) -> tuple[Tensor, Memory]:
        """Return the output for new tokens, summed over the steps, and the state after them.

        Args:
            value: ``[batch, kv_heads, kv_len, value_dim]``, where kv_heads are those of the recurrence; if every step
                writes, with the values of all steps side by side, ``[..., steps * value_dim]``.
            memory: as in `RecurrenceMatrix.advance`.
        """
        out, memory = self.whole.advance(self._written(value), memory)
        return out[:, :, self.steps - 1 :: self.steps], memory

    def total(self, value: Tensor) -> Tensor:
        """Return the output, ``[batch, heads, q_len, value_dim]``, which is the sum over the heads of the steps.

        Values are those of `advance`.
        """
        return self.whole.matmul(self._written(value))[:, :, self.steps - 1 :: self.steps]

    def _written(self, value: Tensor) -> Tensor:
        """Return the values that each step writes, ``[batch, kv_heads, kv_len * steps, value_dim]``."""
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
            weights = self._own(self._parts.weights_of(b, heads, steps).unflatten(3, (-1, n)), heads)
            yield Block(slice(b, b + 1), heads, span, (range(weights.shape[3]),), weights)

    def _compute_by_sweep(self, statistics: Sequence[Statistic[Any, Any]], info: MatrixInfo) -> dict[int, Any]:
        return column_sums(self, statistics)

    @cached_property
    def _parts(self) -> RecurrenceMatrix:
        """The recurrence over all steps, repeated so that each head of this matrix has one of its own."""
        return self.whole if self._heads == list(range(self.whole.shape[1])) else self.whole.of_heads(self._heads)

    def _times(self, value: Tensor) -> Tensor:
        parts = self._parts
        if parts is not self.whole:  # one key head for each head
            each = self.whole.shape[1] // max(1, self.whole.kv_heads)
            if self.kv_heads != self.shape[1]:
                value = value.unflatten(1, (-1, self.writers)).repeat_interleave(each, 1).flatten(1, 2)
        heads = value.shape[1]
        places = torch.tensor(self._places[:heads], device=value.device)
        is_own = F.one_hot(places, self.steps).bool()[:, None, :, None]
        out = parts.matmul(torch.where(is_own, value[:, :, :, None], 0.0).flatten(2, 3))
        return out[:, :, self.steps - 1 :: self.steps]

    def _own(self, x: Tensor, heads: slice = slice(None)) -> Tensor:
        """Return each head's own step of ``x [batch, heads, any, len, steps]``, as ``[batch, heads, any, len]``."""
        places = torch.tensor(self._places[heads], device=x.device)[:, None, None, None]
        return x.gather(4, places.expand(*x.shape[:4], 1)).squeeze(4)


def last_of(x: Tensor, steps: int) -> Tensor:
    """Return tokens ``[batch, heads, len, width]`` as steps of which the last of each token has it, all others 0."""
    return F.pad(x[:, :, :, None], (0, 0, steps - 1, 0)).flatten(2, 3)


def first_of(x: Tensor, steps: int) -> Tensor:
    """Return tokens ``[batch, heads, len, width]`` as steps of which the first of each token has it, all others 0."""
    return F.pad(x[:, :, :, None], (0, 0, 0, steps - 1)).flatten(2, 3)


def in_steps(visible: Visible, steps: int) -> Visible:
    """Return a mask of tokens as the mask of their steps, which have the positions and documents of their tokens."""

    def repeated(x: Tensor | None) -> Tensor | None:
        return None if x is None else x.repeat_interleave(steps, 1)

    return dataclasses.replace(
        visible,
        offset=None if visible.offset is None else visible.offset * steps,
        q_positions=visible.q_positions.repeat_interleave(steps, 1),
        kv_positions=visible.kv_positions.repeat_interleave(steps, 1),
        hidden_rows=repeated(visible.hidden_rows),
        hidden_keys=repeated(visible.hidden_keys),
        q_documents=repeated(visible.q_documents),
        kv_documents=repeated(visible.kv_documents),
    )
