"""A matrix of softmax attention with some of its ingredients replaced, or with a few of its heads."""

from __future__ import annotations

import copy
import dataclasses
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from saccade.attention import AttentionMatrix
from saccade.engine.at_positions import AtPositions
from saccade.engine.ingredients import ScoreMatrix
from saccade.errors import value_error
from saccade.masks import Mask
from saccade.matrix import Matrix
from saccade.recording.matrices import ChosenHeads

__all__ = ["chosen_heads", "remade"]

_OTHERS = ("origin", "dtype", "scale", "softcap", "tile_function")


def remade(matrix: AttentionMatrix, query: Tensor, key: Tensor, **changes: Any) -> AttentionMatrix:
    """The same matrix with other queries and keys; the given matrix is not changed.

    Args:
        matrix: the one that is changed.
        query, key: as its score has prepared them.
        changes: others of its ingredients: rule, bias, parameters or sink_logit.
    """
    old = matrix.scores
    given = {name: getattr(old, name) for name in ("rule", "bias", "parameters", "sink_logit")} | changes
    if given["rule"] is old.rule and (query.shape, key.shape) == (old.query.shape, old.key.shape):
        scores = old.replaced(query, key)  # with its plan
        scores.bias, scores.parameters = given["bias"], given["parameters"]
    else:
        others = {name: getattr(old, name) for name in _OTHERS}
        scores = ScoreMatrix.assembled(
            query, key, given["rule"], bias=given["bias"], parameters=given["parameters"], **others
        )
        scores.where = old.where
    scores.sink_logit = given["sink_logit"]
    other = copy.copy(matrix)
    other.scores, other._lse = scores, None
    return other


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
