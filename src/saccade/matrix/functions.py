"""The functions attention() and attention_with_lse(): attention output from query, key and value."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Never

import torch
from torch import Tensor

from saccade.engine import (
    custom_op,
    flop_formulas,  # noqa: F401  registers them with torch
)
from saccade.engine.dispatch import DEFAULT, attend, attend_with_lse
from saccade.engine.inputs import AttentionInputs
from saccade.engine.kernels.kernel import Request
from saccade.engine.nested import Nested, check_nested, is_nested
from saccade.engine.short_calls import short_attention
from saccade.masks import Causal
from saccade.matrix.attention_matrix import Impl
from saccade.positions import Bias
from saccade.positions.token_positions import GivenPositions
from saccade.scores import Score
from saccade.scores.base import ScoreMod
from saccade.support.argument_hints import unexpected_argument
from saccade.support.torch_modes import is_one_operation, is_tracing, is_transformed, num_dispatch_modes

OBSERVERS: list[Callable[[AttentionInputs, Impl], None]] = []
"""Functions called with the inputs after each `attention` or `attention_with_lse`. Recordings add theirs here."""


def attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    mask: object = None,
    *,
    score: Score | ScoreMod | None = None,
    bias: Tensor | Bias | None = None,
    scale: float | None = None,
    softcap: float | None = None,
    sink_logit: Tensor | None = None,
    dropout_p: float = 0.0,
    impl: Impl = "auto",
    q_positions: GivenPositions = None,
    kv_positions: GivenPositions = None,
    **unknown: Never,
) -> Tensor:
    """Compute exact softmax attention: ``AttentionMatrix(query, key, mask, ...) @ value``.

    Args:
        query: ``[batch, heads, q_len, head_dim]``, or a nested tensor if key and value are nested as well. Each nested
            item attends only to itself. Items run as one packed sequence, and the mask uses positions within an item.
        key: ``[batch, kv_heads, kv_len, head_dim]``.
        value: ``[batch, kv_heads, kv_len, value_dim]``.
        mask, score, bias, scale, softcap, sink_logit, impl, q_positions, kv_positions: see `AttentionMatrix`.
        dropout_p: probability that a weight is dropped; the caller passes 0 in evaluation.

    Returns:
        ``[batch, heads, q_len, value_dim]`` in the query's dtype; scores and softmax are computed in float32 or
        wider. A row without visible keys is exactly 0, its lse is -inf, and its gradients are 0.

    Raises:
        ValueError, TypeError: arguments do not match.
        UnsupportedError: the kernel named by ``impl`` does not support these inputs; every reason is listed.

    Cost: time O(pairs in the mask's plan · head_dim). Beyond inputs and output, memory is needed for one tile or a few
    blocks of scores, 4 or 8 MB each; with ``impl="reference"``, it is O(q_len · kv_len). Exact: yes. Deterministic:
    yes, except for dropout.

    Example:
        >>> q = k = v = torch.ones(1, 2, 4, 8)
        >>> attention(q, k, v).shape
        torch.Size([1, 2, 4, 8])
    """
    if unknown:
        raise unexpected_argument(unknown, attention)
    # fmt: off
    if is_nested(query, key, value):
        return _of_nested(
            attention, query, key, value, mask, q_positions, kv_positions, score=score, bias=bias, scale=scale,
            softcap=softcap, sink_logit=sink_logit, dropout_p=dropout_p, impl=impl,
        )
    # fmt: on
    if (
        (mask is None or type(mask) is Causal)
        and score is None
        and bias is None
        and scale is None
        and softcap is None
        and sink_logit is None
        and q_positions is None
        and kv_positions is None
        and impl == "auto"
        and type(dropout_p) is float
        and dropout_p == 0.0
        and not OBSERVERS
        and (out := short_attention(query, key, value, mask is not None)) is not None
    ):
        return out
    # fmt: off
    inputs = AttentionInputs.of(
        query, key, mask, score=score, bias=bias, scale=scale, softcap=softcap, sink_logit=sink_logit,
        q_positions=q_positions, kv_positions=kv_positions,
    )
    # fmt: on
    has_modes = is_tracing() or num_dispatch_modes() or is_transformed()  # each Python call counts
    run = custom_op.attend if has_modes and is_one_operation() else attend
    is_default = type(dropout_p) is float and dropout_p == 0.0 and impl == "auto"
    out = run(inputs, value, DEFAULT if is_default else Request(dropout_p, impl))[0]
    for observe in OBSERVERS:
        observe(inputs, impl)
    return out


def attention_with_lse(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    mask: object = None,
    *,
    score: Score | ScoreMod | None = None,
    bias: Tensor | Bias | None = None,
    scale: float | None = None,
    softcap: float | None = None,
    sink_logit: Tensor | None = None,
    dropout_p: float = 0.0,
    impl: Impl = "auto",
    q_positions: GivenPositions = None,
    kv_positions: GivenPositions = None,
    **unknown: Never,
) -> tuple[Tensor, Tensor]:
    """Compute the output of `attention` and the log-sum-exp (lse) of each row's scores, ``[batch, heads, q_len]``.

    Two results over disjoint keys are merged using their lse: ``lse = logaddexp(lse1, lse2)``,
    ``out = out1 * exp(lse1 - lse) + out2 * exp(lse2 - lse)``. The lse is a natural log in float32 (float64 for float64
    inputs), -inf for a row without visible keys, and differentiable. Dropout does not change it.
    """
    if unknown:
        raise unexpected_argument(unknown, attention_with_lse)
    # fmt: off
    if is_nested(query, key, value):
        return _of_nested(
            attention_with_lse, query, key, value, mask, q_positions, kv_positions, score=score, bias=bias, scale=scale,
            softcap=softcap, sink_logit=sink_logit, dropout_p=dropout_p, impl=impl,
        )
    inputs = AttentionInputs.of(
        query, key, mask, score=score, bias=bias, scale=scale, softcap=softcap, sink_logit=sink_logit,
        q_positions=q_positions, kv_positions=kv_positions,
    )
    # fmt: on
    run = custom_op.attend_with_lse if is_one_operation() else attend_with_lse
    results = run(inputs, value, Request(dropout_p, impl))
    for observe in OBSERVERS:
        observe(inputs, impl)
    return results


def _of_nested(
    run: Callable[..., Any],
    query: Tensor,
    key: Tensor,
    value: Tensor,
    mask: object,
    q_positions: GivenPositions,
    kv_positions: GivenPositions,
    **options: Any,
) -> Any:
    """Run `attention` or `attention_with_lse` on nested tensors and return nested results."""
    if is_tracing():  # a compiled graph cannot read the lengths of the items
        outside = torch.compiler.disable(_of_nested)
        return outside(run, query, key, value, mask, q_positions, kv_positions, **options)
    positions = {"q_positions": q_positions, "kv_positions": kv_positions}
    check_nested(mask, options["bias"], options["score"], **positions)
    items = Nested.of(query, key, value, axis=1)
    joined = items.mask(mask, items.query.shape[1])
    out = run(items.query, items.key, items.value, joined, **options, **items.positions)
    return items.unpacked(out) if isinstance(out, Tensor) else tuple(map(items.unpacked, out))
