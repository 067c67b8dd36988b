"""Redirected calls: attention calls of a model that saccade computes instead of the model's own code."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

from torch import Tensor

from saccade.engine.inputs import AttentionInputs
from saccade.integrations.lazy_mask import dense_at
from saccade.integrations.tensor_masks import joined
from saccade.masks import Dense, Mask
from saccade.matrix import AttentionMatrix, Matrix, matrix_from_inputs
from saccade.support.torch_modes import has_values


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
        is_changed: whether the matrix may differ from the one that the model asked for.
    """

    out: Tensor
    matrix: Matrix
    value: Tensor
    is_changed: bool = False


Attend = Callable[[Call], Redirected | None]
"""A function that computes an attention call, or returns None to leave it to the model's own code."""


def without_free_slots(call: Call) -> Call:
    """Return a call without its last keys if no query may attend to them, such as the free slots of a static cache.

    Masks that use positions require the last query to be at the last key. Other calls are returned unchanged.
    """
    kv_len = call.value.shape[2]
    if call.q_len >= kv_len or call.returns_weights:
        return call
    inputs = call.matrix(None).inputs
    used = _used_keys(inputs)
    if used == kv_len:
        return call
    assert isinstance(inputs.rule, Dense)
    bias = None if inputs.bias is None else inputs.bias.source
    key, allowed = inputs.key[:, :, :used], Dense(inputs.rule.allowed[..., :used])
    bias = bias if bias is None or bias.shape[3] != kv_len else bias[..., :used]

    def matrix(more: Mask | None) -> AttentionMatrix:
        options: dict[str, Any] = {"bias": bias, "scale": inputs.scale, "softcap": inputs.softcap}
        return AttentionMatrix(inputs.query, key, joined(allowed, more), **options)

    return call._replace(matrix=matrix, value=call.value[:, :, :used])


def placed_before_free_slots(matrix: Matrix) -> Matrix:
    """Return the matrix of a call, with the last query at the last used key if the call has a static cache.

    Any other matrix is returned unchanged. A call has a static cache if a mask tensor masks the last keys for all
    queries and, with the new positions, no query may attend to a later key. The shape stays the same.
    """
    if not isinstance(matrix, AttentionMatrix):
        return matrix
    inputs, (_, _, q_len, kv_len) = matrix.inputs, matrix.shape
    used, has_terms = _used_keys(inputs), inputs.bias is not None and not inputs.bias.is_materialised
    if used == kv_len or has_terms or inputs.modification is not None:  # these depend on positions
        return matrix
    assert isinstance(inputs.rule, Dense)
    rule, first, allowed = inputs.rule, used - q_len, inputs.rule.allowed
    if q_len > 1:
        if allowed.shape[2] == 1 or bool(allowed.triu(first + 1).any()):
            return matrix
        rule = dense_at(allowed, range(first, used), range(kv_len))
    return matrix_from_inputs(inputs.replaced(rule=rule, origin=(first, 0)), matrix.impl)


def _used_keys(inputs: AttentionInputs) -> int:
    """Return the number of keys, not counting those at the end that a mask tensor masks for all queries.

    All keys count if positions were given, if there are at least as many queries as keys, or if the values of the mask
    cannot be read.
    """
    rule, (_, _, q_len, kv_len) = inputs.rule, inputs.shape
    has_positions = inputs.row_positions is not None or inputs.origin != (kv_len - q_len, 0)
    if q_len >= kv_len or has_positions or not isinstance(rule, Dense) or rule.allowed.shape[3] != kv_len:
        return kv_len
    if not has_values(rule.allowed):
        return kv_len
    seen = rule.allowed.flatten(0, 2).any(0).nonzero()
    used = int(seen[-1]) + 1 if len(seen) else kv_len
    return used if q_len <= used else kv_len
