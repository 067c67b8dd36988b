"""A few heads of a matrix."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

import torch
from torch import Tensor

from saccade.attention import AttentionMatrix, from_ingredients
from saccade.engine.at_positions import AtPositions
from saccade.errors import value_error
from saccade.masks import Mask
from saccade.matrix import Matrix
from saccade.recording.matrices import ChosenHeads

__all__ = ["chosen_heads"]


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
    if not isinstance(matrix, AttentionMatrix) or matrix.ingredients.tile_function is not None:
        return ChosenHeads(matrix, heads)
    given, own = matrix.ingredients, list(heads)
    bias, rule, share = given.bias, given.rule, there // given.key.shape[1]
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
    """A mask for some of the heads that it tells apart."""

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
    """The rule for some heads; where it is read at given positions, it still is."""
    if isinstance(rule, AtPositions):
        return dataclasses.replace(rule, mask=_OfHeads(rule.mask, heads))
    return _OfHeads(rule, heads)
