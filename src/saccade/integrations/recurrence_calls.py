"""What models of transformers call for a recurrence, as queries, keys and gates of ours."""

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

CALLED_AS = "record"  # in errors

Given = Mapping[str, Any]
"""The arguments of a call, by name."""

_DELTA, _LINEAR = Delta(), GatedLinear(scale=1.0)


class Tokens(NamedTuple):
    """What some tokens do to a state, and read from it.

    Attributes:
        rule: the mechanism.
        query: ``[batch, heads, q_len, head_dim]``, of the last tokens.
        key: ``[batch, key_heads, kv_len, head_dim]``.
        decay: log decay, ``[batch, kv_heads, kv_len]``, or ``[..., head_dim]``.
        beta: how much is written, ``[batch, kv_heads, kv_len]``; None for 1.
    """

    rule: GatedLinear | Delta
    query: Tensor
    key: Tensor
    decay: Tensor
    beta: Tensor | None

    def matrix(self) -> RecurrenceMatrix:
        """The matrix, in float32 or wider, as these models compute whatever their weights are in."""
        query, key, decay = (x.detach().to(wide_dtype(x.dtype)) for x in (self.query, self.key, self.decay))
        beta = None if self.beta is None else self.beta.detach()
        matrix: RecurrenceMatrix = self.rule(query, key, decay=decay, beta=beta, mask=Causal())
        return matrix


class Function(NamedTuple):
    """A function that models call for a recurrence.

    Attributes:
        names: of its first arguments.
        state: the argument with the state that the tokens go on from.
        tokens: makes of a call's arguments what its tokens do.
        last: gives the state after them, of the arguments and of what the function said; None where it does not tell.
    """

    names: tuple[str, ...]
    state: str
    tokens: Callable[[Given], Tokens]
    last: Callable[[Given, Any], Tensor | None]


def _delta_tokens(given: Given) -> Tokens:
    """Of ``[batch, len, heads, ...]``."""
    if given.get("cu_seqlens") is not None:
        raise _packed("cu_seqlens")
    query, key, decay, beta = (given[name].transpose(1, 2) for name in ("query", "key", "g", "beta"))
    if given.get("use_qk_l2norm_in_kernel"):
        query, key = _unit(query), _unit(key)
    return Tokens(_DELTA, query, key, decay, beta)


def _unit(x: Tensor) -> Tensor:
    x = x.to(wide_dtype(x.dtype))
    return x * torch.rsqrt(x.square().sum(-1, keepdim=True) + 1e-6)


def _scan_tokens(given: Given) -> Tokens:
    """Of Mamba-2's ``B, C [batch, len, groups, state]`` and ``dt [batch, len, heads]``."""
    if given.get("seq_idx") is not None:
        raise _packed("seq_idx")
    low, high = given.get("dt_limit") or (0.0, float("inf"))
    step = _step(given["dt"], given.get("dt_bias"), given).clamp(low, high).transpose(1, 2)
    return _ssd(given["C"].transpose(1, 2), given["B"].transpose(1, 2), step, given["A"])


def _step_tokens(given: Given) -> Tokens:
    """Of a single token: ``B, C [batch, groups, state]``, ``dt [batch, heads, head_dim]``, ``A [heads, ...]``."""
    bias = given.get("dt_bias")
    step = _step(given["dt"][..., 0], None if bias is None else bias[..., 0], given)[..., None]
    return _ssd(given["C"][:, :, None], given["B"][:, :, None], step, given["A"][:, 0, 0])


def _step(raw: Tensor, bias: Tensor | None, given: Given) -> Tensor:
    step = raw if bias is None else raw + bias.to(raw.dtype)
    return (F.softplus(step) if given.get("dt_softplus") else step).to(wide_dtype(raw.dtype))


def _ssd(query: Tensor, key: Tensor, step: Tensor, rate: Tensor) -> Tokens:
    """`saccade.mechanisms.SSD` with a rate that is given, below 0, ``[heads]``."""
    return Tokens(_LINEAR, query, key, step * rate[:, None].to(step), step)


def lightning_tokens(projected: Tensor, slopes: Tensor) -> Tokens:
    """Of lightning attention.

    Args:
        projected: queries, keys and values of each head, ``[batch, len, heads, 3 * head_dim]``, after the activation
            function, and 0 where there is no token.
        slopes: by which a head's sum fades, ``[heads]``.
    """
    query, key, _ = projected.transpose(1, 2).chunk(3, -1)
    batch, heads, length, _ = query.shape
    decay = -slopes.to(wide_dtype(query.dtype))[None, :, None].expand(batch, heads, length)
    return Tokens(_LINEAR, query, key, decay, None)


def _packed(name: str) -> Exception:
    reason = f"it hands {name} to its kernel, which tells packed documents apart"
    return unsupported("a recurrence", [reason], hint="a padded batch is heard")


def _second(given: Given, out: Any) -> Tensor | None:
    del given
    return out[1] if isinstance(out, tuple) else None


_DELTA_RULE = Function(("query", "key", "value", "g", "beta"), "initial_state", _delta_tokens, _second)
_TOKENS = ("hidden_states", "dt", "A", "B", "C")

_SCAN = Function(_TOKENS, "initial_states", _scan_tokens, _second)
# It writes into the state.
_STEP = Function(("state", *_TOKENS), "state", _step_tokens, lambda given, _: given["state"])

FUNCTIONS = {
    "torch_chunk_gated_delta_rule": _DELTA_RULE,
    "torch_recurrent_gated_delta_rule": _DELTA_RULE,
    "chunk_kimi_delta_attention": _DELTA_RULE,
    "recurrent_kimi_delta_attention": _DELTA_RULE,
    "mamba2_chunk_scan": _SCAN,
    "mamba2_selective_state_update": _STEP,
}
"""By the names under which the files of models have them; where there are fast kernels, these stand under the same."""

ATTRIBUTES = {"chunk_gated_delta_rule": _DELTA_RULE, "recurrent_gated_delta_rule": _DELTA_RULE}
"""By the names of attributes under which layers of older versions have them."""
