"""A few heads of a matrix, as a matrix."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import Tensor

from saccade.attention import AttentionMatrix
from saccade.engine.at_positions import AtPositions
from saccade.errors import value_error
from saccade.masks import Mask
from saccade.matrix import Matrix
from saccade.plan import Ranges
from saccade.recording.around import Around
from saccade.recording.remade import remade
from saccade.statistics import Block

__all__ = ["ChosenHeads", "chosen_heads"]


def chosen_heads(matrix: Matrix, heads: Sequence[int]) -> Matrix:
    """Chosen heads of a matrix, in the order in which they are named.

    Args:
        matrix: of all heads.
        heads: which, counted from 0.

    Raises:
        ValueError: a head that is not there.

    Cost: softmax attention gets copies of these heads' queries and keys; of any other matrix nothing is copied, and
    the heads are asked one at a time.
    """
    there = matrix.shape[1]
    if not all(0 <= head < there for head in heads):
        raise value_error("record", "heads", f"be 0 to {there - 1}", list(heads))
    if not isinstance(matrix, AttentionMatrix) or matrix.scores.tile_function is not None:
        return ChosenHeads(matrix, heads)
    scores, own = matrix.scores, list(heads)
    share = there // scores.key.shape[1]
    few: dict[str, Any] = {}
    if scores.sink_logit is not None:
        few["sink_logit"] = scores.sink_logit[own]
    if scores.bias is not None and scores.bias.source.shape[1] > 1:
        few["bias"] = scores.bias.of(scores.bias.source[:, own])
    if scores.rule.shape[1] > 1 or scores.rule.asks_functions:  # functions may tell heads apart and not say so
        few["rule"] = _of_heads(scores.rule, tuple(own))
    return remade(matrix, scores.query[:, own], scores.key[:, [head // share for head in own]], **few)


@dataclasses.dataclass(frozen=True)
class _OfHeads(Mask):
    """A mask that tells heads apart, for some of them."""

    mask: Mask
    heads: tuple[int, ...]

    @property
    def shape(self) -> tuple[int, int]:
        return (self.mask.shape[0], len(self.heads))

    @property
    def is_value(self) -> bool:
        return self.mask.is_value

    @property
    def asks_functions(self) -> bool:
        return self.mask.asks_functions

    def allows(self, b: Tensor, h: Tensor, q: Tensor, kv: Tensor) -> Tensor:
        return self.mask.allows(b, torch.tensor(self.heads, device=h.device)[h], q, kv)

    def tensors(self) -> tuple[Tensor, ...]:
        return self.mask.tensors()


def _of_heads(rule: Mask, heads: tuple[int, ...]) -> Mask:
    """The rule for some heads; one that is read at given positions stays so."""
    if isinstance(rule, AtPositions):
        return dataclasses.replace(rule, mask=_OfHeads(rule.mask, heads))
    return _OfHeads(rule, heads)


class ChosenHeads(Around):
    """Chosen heads of a matrix, in the order in which they are named; nothing is copied.

    Args:
        matrix: the matrix of all heads.
        heads: which, counted from 0.

    Attributes:
        inner: the matrix of all heads.
        heads: which of them these are.

    Example:
        >>> from saccade import AttentionMatrix
        >>> ChosenHeads(AttentionMatrix(torch.zeros(1, 4, 3, 8), torch.zeros(1, 4, 3, 8)), [3, 1]).shape
        (1, 2, 3, 3)
    """

    def __init__(self, matrix: Matrix, heads: Sequence[int]):
        super().__init__(matrix)
        self.heads = tuple(heads)

    @property
    def shape(self) -> tuple[int, int, int, int]:
        batch, _, q_len, kv_len = self.inner.shape
        return (batch, len(self.heads), q_len, kv_len)

    @property
    def kv_heads(self) -> int:
        """As many as heads: values for a product are those of each head chosen."""
        return len(self.heads)

    def blocks(self, batch: int | None = None, head: int | None = None, rows: range | None = None) -> Iterator[Block]:
        self._check_part(batch, head, rows)
        for number, own in enumerate(self.heads):
            if head is None or head == number:
                for block in self.inner.blocks(batch, own, rows):
                    yield block._replace(heads=slice(number, number + 1))

    def positions(self, rows: range, columns: Ranges) -> tuple[Tensor, Tensor]:
        return self.inner.positions(rows, columns)
