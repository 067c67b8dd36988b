"""A matrix of softmax attention with some of its ingredients replaced."""

from __future__ import annotations

import copy
from typing import Any

from torch import Tensor

from saccade.attention import AttentionMatrix
from saccade.engine.ingredients import ScoreMatrix

__all__ = ["remade"]

_OTHERS = ("origin", "dtype", "scale", "softcap", "tile_function")


def remade(matrix: AttentionMatrix, query: Tensor, key: Tensor, **changes: Any) -> AttentionMatrix:
    """The same matrix of other queries and keys; the matrix itself stays as it is.

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
