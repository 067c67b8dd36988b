"""Convert the recurrence calls of transformers models to saccade's queries, keys and gates."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn import functional as F

from saccade.masks import Causal
from saccade.mechanisms.gated_linear import Delta, GatedLinear
from saccade.mechanisms.recurrences.recurrence_matrix import RecurrenceMatrix
from saccade.support.errors import unsupported
from saccade.support.numerics import wide_dtype

CALLED_AS = "record"  # the name in error messages

Arguments = Mapping[str, Any]
"""The arguments of a recurrence call, by name."""

_DELTA, _LINEAR = Delta(), GatedLinear(scale=1.0)


class Tokens(NamedTuple):
    """The queries, keys and gates of the tokens in a recurrence call.

    Attributes:
        rule: the mechanism that computes the recurrence.
        query: ``[batch, heads, q_len, head_dim]``, the queries of the last ``q_len`` tokens.
        key: ``[batch, key_heads, kv_len, head_dim]``.
        decay: log decay, ``[batch, kv_heads, kv_len]``, or ``[..., head_dim]``.
        beta: write strength, ``[batch, kv_heads, kv_len]``; None means 1.
    """

    rule: GatedLinear | Delta
    query: Tensor
    key: Tensor
    decay: Tensor
    beta: Tensor | None

    def matrix(self) -> RecurrenceMatrix:
        """Return the recurrence's matrix in float32 or wider, the dtype in which these models compute it."""
        query, key, decay = (x.detach().to(wide_dtype(x.dtype)) for x in (self.query, self.key, self.decay))
        beta = None if self.beta is None else self.beta.detach()
        matrix: RecurrenceMatrix = self.rule(query, key, decay=decay, beta=beta, mask=Causal())
        return matrix


class Function(NamedTuple):
    """A function that models call to compute a recurrence.

    Attributes:
        names: the names of the function's first arguments, in order.
        state: the name of the argument that contains the state before the call.
        tokens: converts the arguments of a call to `Tokens`.
        final_state: returns the state after the call from its arguments and result; None if the state is unknown.
    """

    names: tuple[str, ...]
    state: str
    tokens: Callable[[Arguments], Tokens]
    final_state: Callable[[Arguments, Any], Tensor | None]


def _delta_tokens(arguments: Arguments) -> Tokens:
    """Convert the arguments of a delta rule, ``[batch, len, heads, ...]``, to `Tokens`."""
    if arguments.get("cu_seqlens") is not None:
        raise _packed("cu_seqlens")
    query, key, decay, beta = (arguments[name].transpose(1, 2) for name in ("query", "key", "g", "beta"))
    if arguments.get("use_qk_l2norm_in_kernel"):
        query, key = _unit(query), _unit(key)
    return Tokens(_DELTA, query, key, decay, beta)


def _unit(x: Tensor) -> Tensor:
    x = x.to(wide_dtype(x.dtype))
    return x * torch.rsqrt(x.square().sum(-1, keepdim=True) + 1e-6)


def _scan_tokens(arguments: Arguments) -> Tokens:
    """Convert Mamba-2's ``B, C [batch, len, groups, state]`` and ``dt [batch, len, heads]`` to `Tokens`."""
    if arguments.get("seq_idx") is not None:
        raise _packed("seq_idx")
    low, high = arguments.get("dt_limit") or (0.0, float("inf"))
    step = _step(arguments["dt"], arguments.get("dt_bias"), arguments).clamp(low, high).transpose(1, 2)
    return _ssd(arguments["C"].transpose(1, 2), arguments["B"].transpose(1, 2), step, arguments["A"])


def _step_tokens(arguments: Arguments) -> Tokens:
    """Convert a Mamba-2 token: ``B, C [batch, groups, state]``, ``dt [batch, heads, head_dim]``, ``A [heads, ...]``."""
    bias = arguments.get("dt_bias")
    step = _step(arguments["dt"][..., 0], None if bias is None else bias[..., 0], arguments)[..., None]
    return _ssd(arguments["C"][:, :, None], arguments["B"][:, :, None], step, arguments["A"][:, 0, 0])


def _step(raw: Tensor, bias: Tensor | None, arguments: Arguments) -> Tensor:
    step = raw if bias is None else raw + bias.to(raw.dtype)
    return (F.softplus(step) if arguments.get("dt_softplus") else step).to(wide_dtype(raw.dtype))


def _ssd(query: Tensor, key: Tensor, step: Tensor, rate: Tensor) -> Tokens:
    """Return the `Tokens` of a Mamba-2 call; the log decay is ``step`` times the (negative) ``rate [heads]``."""
    return Tokens(_LINEAR, query, key, step * rate[:, None].to(step), step)


def lightning_tokens(projected: Tensor, slopes: Tensor) -> Tokens:
    """Convert the projections of lightning attention to `Tokens`.

    Args:
        projected: concatenated queries, keys and values, ``[batch, len, heads, 3 * head_dim]``, after the activation
            function; 0 at padding.
        slopes: the decay of each head, ``[heads]``.
    """
    query, key, _ = projected.transpose(1, 2).chunk(3, -1)
    batch, heads, length, _ = query.shape
    decay = -slopes.to(wide_dtype(query.dtype))[None, :, None].expand(batch, heads, length)
    return Tokens(_LINEAR, query, key, decay, None)


def _packed(name: str) -> Exception:
    reason = f"it passes {name} to its kernel, which separates packed documents"
    return unsupported("a recurrence", [reason], hint="record a padded batch instead")


def _second_output(arguments: Arguments, out: Any) -> Tensor | None:
    del arguments
    return out[1] if isinstance(out, tuple) else None


_DELTA_RULE = Function(("query", "key", "value", "g", "beta"), "initial_state", _delta_tokens, _second_output)
_TOKENS = ("hidden_states", "dt", "A", "B", "C")

_SCAN = Function(_TOKENS, "initial_states", _scan_tokens, _second_output)
# The step function modifies the state in place.
_STEP = Function(("state", *_TOKENS), "state", _step_tokens, lambda arguments, _: arguments["state"])

FUNCTIONS = {
    "torch_chunk_gated_delta_rule": _DELTA_RULE,
    "torch_recurrent_gated_delta_rule": _DELTA_RULE,
    "chunk_kimi_delta_attention": _DELTA_RULE,
    "recurrent_kimi_delta_attention": _DELTA_RULE,
    "mamba2_chunk_scan": _SCAN,
    "mamba2_selective_state_update": _STEP,
}
"""Recurrence functions by global name in a model's source file; fast kernels have the same names."""

ATTRIBUTES = {"chunk_gated_delta_rule": _DELTA_RULE, "recurrent_gated_delta_rule": _DELTA_RULE}
"""Recurrence functions by layer attribute name, for older versions of transformers."""
