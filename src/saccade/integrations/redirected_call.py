"""Redirected calls: attention calls of a model that saccade computes in the model's place."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

from torch import Tensor

from saccade.integrations.tensor_masks import joined
from saccade.masks import Dense, Mask
from saccade.matrix import AttentionMatrix, Matrix


class Call(NamedTuple):
    """An attention call that a model is about to make.

    Attributes:
        matrix: builds the attention matrix of the call, restricted by an additional mask.
        value: ``[batch, kv_heads, kv_len, value_dim]``.
        q_len: number of queries.
        dropout_p: dropout probability.
        returns_weights: whether the model also receives the weights, so that the matrix must have all keys.
    """

    matrix: Callable[[Mask | None], AttentionMatrix]
    value: Tensor
    q_len: int
    dropout_p: float
    returns_weights: bool = False


class Redirected(NamedTuple):
    """The result of a redirected attention call.

    Attributes:
        out: ``[batch, heads, q_len, value_dim]``.
        matrix: the matrix that was multiplied by the values.
        value: the values, ``[batch, kv_heads, kv_len, value_dim]``.
    """

    out: Tensor
    matrix: Matrix
    value: Tensor


Attend = Callable[[Call], Redirected | None]
"""A function that computes an attention call, or returns None to leave it to the model's own code."""


def without_free_slots(call: Call) -> Call:
    """Return a call without its last keys if no query may attend to them, such as the free slots of a static cache.

    The last query is then at the last key, as masks on positions require. Other calls are returned unchanged.
    """
    kv_len = call.value.shape[2]
    if call.q_len >= kv_len or call.returns_weights:
        return call
    inputs = call.matrix(None).inputs
    rule, bias = inputs.rule, None if inputs.bias is None else inputs.bias.source
    if not isinstance(rule, Dense) or rule.allowed.shape[3] != kv_len:
        return call
    seen = rule.allowed.flatten(0, 2).any(0).nonzero()
    used = int(seen[-1]) + 1 if len(seen) else kv_len
    if not call.q_len <= used < kv_len:
        return call
    key, allowed = inputs.key[:, :, :used], Dense(rule.allowed[..., :used])
    bias = bias if bias is None or bias.shape[3] != kv_len else bias[..., :used]

    def matrix(more: Mask | None) -> AttentionMatrix:
        options: dict[str, Any] = {"bias": bias, "scale": inputs.scale, "softcap": inputs.softcap}
        return AttentionMatrix(inputs.query, key, joined(allowed, more), **options)

    return call._replace(matrix=matrix, value=call.value[:, :, :used])
