"""A few heads of a matrix, as a matrix."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Sequence

import torch
from torch import Tensor

from saccade.attention import AttentionMatrix, from_ingredients
from saccade.engine.at_positions import AtPositions
from saccade.errors import value_error
from saccade.masks import Mask
from saccade.matrix import Matrix
from saccade.plan import Ranges
from saccade.statistics import Block

__all__ = ["SomeHeads", "some_heads"]


def some_heads(matrix: Matrix, heads: Sequence[int]) -> Matrix:
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
    if not isinstance(matrix, AttentionMatrix) or matrix.ingredients.tile_function is not None:
        return SomeHeads(matrix, heads)
    given, own = matrix.ingredients, list(heads)
    share = there // given.key.shape[1]
    bias, rule = given.bias, given.rule
    if bias is not None and bias.source.shape[1] > 1:
        bias = bias.of(bias.source[:, own])
    if rule.shape[1] > 1 or rule.asks_functions:  # functions may tell heads apart and not say so
        rule = _of_heads(rule, tuple(own))
    few = given.replaced(
        shape=(given.shape[0], len(own), *given.shape[2:]),
        query=given.query[:, own],
        key=given.key[:, [head // share for head in own]],
        sink_logit=None if given.sink_logit is None else given.sink_logit[own],
        bias=bias,
        rule=rule,
    )
    return from_ingredients(few, matrix.impl)


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


class SomeHeads(Matrix):
    """Chosen heads of a matrix, in the order in which they are named; nothing is copied.

    Args:
        matrix: the matrix of all heads.
        heads: which, counted from 0.

    Attributes:
        whole: the matrix of all heads.
        heads: which of them these are.

    Example:
        >>> from saccade import AttentionMatrix
        >>> SomeHeads(AttentionMatrix(torch.zeros(1, 4, 3, 8), torch.zeros(1, 4, 3, 8)), [3, 1]).shape
        (1, 2, 3, 3)
    """

    def __init__(self, matrix: Matrix, heads: Sequence[int]):
        self.whole, self.heads = matrix, tuple(heads)

    @property
    def shape(self) -> tuple[int, int, int, int]:
        batch, _, q_len, kv_len = self.whole.shape
        return (batch, len(self.heads), q_len, kv_len)

    @property
    def dtype(self) -> torch.dtype:
        return self.whole.dtype

    @property
    def device(self) -> torch.device:
        return self.whole.device

    @property
    def kv_heads(self) -> int:
        """As many as heads: values for a product are those of each head chosen."""
        return len(self.heads)

    @property
    def is_stochastic(self) -> bool:
        return self.whole.is_stochastic

    def blocks(self, batch: int | None = None, head: int | None = None, rows: range | None = None) -> Iterator[Block]:
        self._check_part(batch, head, rows)
        for number, own in enumerate(self.heads):
            if head is None or head == number:
                for block in self.whole.blocks(batch, own, rows):
                    yield block._replace(heads=slice(number, number + 1))

    def positions(self, rows: range, columns: Ranges) -> tuple[Tensor, Tensor]:
        return self.whole.positions(rows, columns)
