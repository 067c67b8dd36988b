"""Redirected calls: attention calls of a model that saccade computes in the model's place."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

from torch import Tensor

from saccade.masks import Mask
from saccade.matrix import AttentionMatrix, Matrix


class Call(NamedTuple):
    """An attention call that a model is about to make.

    Attributes:
        matrix: builds the attention matrix of the call, restricted by an additional mask.
        value: ``[batch, kv_heads, kv_len, value_dim]``.
        q_len: number of queries.
        dropout_p: dropout probability.
    """

    matrix: Callable[[Mask | None], AttentionMatrix]
    value: Tensor
    q_len: int
    dropout_p: float


class Redirected(NamedTuple):
    """The result of a redirected attention call.

    Attributes:
        out: ``[batch, heads, q_len, value_dim]``.
        matrix: the matrix that was multiplied by the values.
    """

    out: Tensor
    matrix: Matrix


Attend = Callable[[Call], Redirected | None]
"""A function that computes an attention call, or returns None to leave it to the model's own code."""
