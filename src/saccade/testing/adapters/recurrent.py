"""The adapter for recurrences, such as delta rules, gated linear attention and state space models."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, Literal

import torch
from torch import Tensor
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

from saccade.support.validation import check_choice
from saccade.testing.adapters.calling_convention import Form, check_kernel_callable

Rule = Literal["linear", "gla", "delta", "gated_delta", "kda", "rwkv7", "ssd"]
RULES: tuple[Rule, ...] = ("linear", "gla", "delta", "gated_delta", "kda", "rwkv7", "ssd")
_INAPPLICABLE_LAWS = ("gradcheck", "half_precision", "ones", "key_order", "gqa", "zero_lengths")
_LAWS_OF_SOFTMAX = ("large_scores", "unusual_values")  # they choose inputs, and allow rounding, by the scores


def recurrent(
    kernel: Callable[..., Any],
    rule: Rule,
    *,
    head_first: bool = False,
    returns_state: bool = True,
    names: Mapping[str, str] | None = None,
    offers: tuple[str, ...] = (),
) -> Form:
    r"""Adapt a recurrent kernel, so that it is compared with the recurrence computed token by token in float64.

    The call is ``kernel(q, k, v, beta=, g=, initial_state=, output_final_state=)`` with tensors ``[batch, len, heads,
    dim]``, as in flash-linear-attention, and with the arguments that the rule needs:

    - "linear": :math:`S_t = S_{t-1} + k_t v_t^T`;
    - "gla": ``g [batch, len, heads, head_dim]``, :math:`S_t = \mathrm{diag}(e^{g_t}) S_{t-1} + k_t v_t^T`;
    - "delta": ``beta [batch, len, heads]``, :math:`S_t = S_{t-1} + \beta_t k_t (v_t - S_{t-1}^T k_t)^T`;
    - "gated_delta": ``g`` and ``beta``, ``[batch, len, heads]``, with :math:`e^{g_t} S_{t-1}` in place of
      :math:`S_{t-1}`;
    - "kda": the same with ``g [batch, len, heads, head_dim]``, as in Kimi Delta Attention;
    - "rwkv7": ``a``, ``b`` and ``g``, ``[batch, len, heads, head_dim]``,
      :math:`S_t = (\mathrm{diag}(e^{g_t}) + b_t a_t^T) S_{t-1} + k_t v_t^T`;
    - "ssd": ``kernel(x, dt, A, B, C, initial_states=, return_final_states=)``, as in Mamba-2, where C is the query, B
      the key, x the value, ``dt [batch, len, heads]`` and ``A [heads]``: :math:`S_t = e^{dt_t A} S_{t-1} + dt_t B_t
      x_t^T`.

    The output is :math:`s S_t^T q_t`, where s is 1 for "ssd" and ``head_dim ** -0.5`` for the other rules. Gates are
    computed from the keys, and the keys of delta rules are normalised to norm 1; in "rwkv7", a is the normalised key
    times -1, and b is the normalised key times a rate for each channel. If there are more keys than queries,
    the kernel first runs on the earlier keys, and the state that it returns is the initial state of a second call.

    Args:
        kernel: the kernel.
        rule: the recurrence.
        head_first: whether tensors are ``[batch, heads, len, dim]``.
        returns_state: whether the kernel takes a state and returns ``(out, state)``; if not, it is tested only with
            equal numbers of keys and queries.
        names: the kernel's names for arguments, such as ``{"g": "gk"}``.
        offers: ``("scale",)`` if the kernel takes a scale.
    """
    check_choice("rule", rule, RULES)
    settings = {
        "rule": rule,
        "head_first": head_first,
        "returns_state": returns_state,
        "names": dict(names or {}),
    }

    return Form(
        check_kernel_callable(kernel),
        run,
        _reasons_against,
        settings,
        offers,
        gqa=False,
        parts=(gates, tokens, recurrence, _call),
        truth=truth,
        # The rate of a head of "ssd" is its number.
        left_out=(*_INAPPLICABLE_LAWS, *_LAWS_OF_SOFTMAX, *(("heads",) if rule == "ssd" else ())),
    )


def truth(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    mask: Tensor,
    *,
    rule: str,
    scale: float | None = None,
    **settings: object,
) -> Tensor:
    """Return the expected output of a recurrence, computed token by token, for float64 inputs and a causal mask."""
    times = query.shape[1] // key.shape[1]
    key, value = (x.repeat_interleave(times, 1) for x in (key, value))
    return torch.where(mask.any(-1, keepdim=True), recurrence(query, key, value, rule=rule, scale=scale), 0.0)


def gates(key: Tensor, rule: str) -> tuple[Tensor, Tensor, Tensor]:
    """Return keys, write strengths ``[batch, heads, len]`` and log decays ``[batch, heads, len, 1 | head_dim]``.

    The write strengths of "rwkv7" are its rates ``[batch, heads, len, head_dim]``.
    """
    write = key.mean(-1)
    fade = -F.softplus(key if rule in ("gla", "kda", "rwkv7") else key[..., :1])
    if rule == "rwkv7":
        return key, key.sigmoid(), fade
    if rule in ("delta", "gated_delta", "kda"):
        key = F.normalize(key, dim=-1)
    if rule == "ssd":  # the rate of head h is h + 1
        step = F.softplus(write)
        rates = torch.arange(1, key.shape[1] + 1, device=key.device, dtype=key.dtype)
        return key, step, -(step * rates[:, None])[..., None]
    beta = write.sigmoid() if rule in ("delta", "gated_delta", "kda") else torch.ones_like(write)
    return key, beta, fade if rule in ("gla", "gated_delta", "kda") else torch.zeros_like(fade)


def recurrence(query: Tensor, key: Tensor, value: Tensor, *, rule: str, scale: float | None = None) -> Tensor:
    """Compute a recurrence token by token, and return its output for the last tokens, one for each query."""
    key, beta, decay = gates(key, rule)
    if scale is None:
        scale = 1.0 if rule == "ssd" else query.shape[3] ** -0.5
    state = value.new_zeros(*key.shape[:2], key.shape[3], value.shape[3])
    before, rows = key.shape[2] - query.shape[2], [value.new_zeros(*query.shape[:2], 0, value.shape[3])]
    for start in range(0, key.shape[2], 16):
        stop = start + 16
        asked = query[:, :, max(0, start - before) : max(0, stop - before)]
        some = [x[:, :, start:stop] for x in (key, value, beta, decay)]
        # The states of all tokens would take gigabytes, so the backward pass computes those of a few tokens again.
        out, state = checkpoint(tokens, state, asked, *some, rule, use_reentrant=False, preserve_rng_state=False)
        rows.append(scale * out)
    return torch.cat(rows, 2)


def tokens(
    state: Tensor, query: Tensor, key: Tensor, value: Tensor, beta: Tensor, decay: Tensor, rule: str
) -> tuple[Tensor, Tensor]:
    """Add tokens to a state one by one; return its products with the queries of the last ones, and the last state."""
    before, rows = key.shape[2] - query.shape[2], []
    for i in range(key.shape[2]):
        k, v, faded = key[:, :, i, :, None], value[:, :, i, None], state * decay[:, :, i, :, None].exp()
        if rule == "rwkv7":
            unit = F.normalize(key[:, :, i], dim=-1)[..., None]
            state = faded - beta[:, :, i, :, None] * unit * (unit * state).sum(-2, keepdim=True) + k * v
        else:
            if rule in ("delta", "gated_delta", "kda"):
                v = v - (k * faded).sum(-2, keepdim=True)
            state = faded + beta[:, :, i, None, None] * k * v
        if i >= before:
            rows.append((query[:, :, i - before, :, None] * state).sum(-2))
    out = torch.stack(rows, 2) if rows else value.new_zeros(*query.shape[:3], value.shape[3])
    return out, state


def run(
    kernel: Callable[..., Any],
    query: Tensor,
    key: Tensor,
    value: Tensor,
    mask: Tensor,
    *,
    rule: str,
    head_first: bool,
    returns_state: bool,
    names: Mapping[str, str],
    **options: Any,
) -> Tensor:
    """Call the kernel on the tokens before the first query, then on the remaining tokens with the resulting state."""
    heads = query.shape[1] // key.shape[1]
    key, value = (x.repeat_interleave(heads, 1) for x in (key, value))
    before, settings = key.shape[2] - query.shape[2], (rule, head_first, returns_state, names)
    written, beta, decay = gates(key, rule)
    tensors = (written, value, beta, decay)
    state = None
    if before:
        early = [x[:, :, :before] for x in tensors]
        _, state = _call(kernel, torch.zeros_like(early[0]), early, None, *settings, options)
    return _call(kernel, query, [x[:, :, before:] for x in tensors], state, *settings, options)[0]


def _call(
    kernel: Callable[..., Any],
    query: Tensor,
    tensors: list[Tensor],
    state: Any,
    rule: str,
    head_first: bool,
    returns_state: bool,
    names: Mapping[str, str],
    options: dict[str, Any],
) -> tuple[Tensor, Any]:
    """Call the kernel with its rule's arguments; return the output ``[batch, heads, len, value_dim]`` and the state."""
    key, value, beta, decay = tensors

    def put(x: Tensor) -> Tensor:
        return x if head_first else x.transpose(1, 2)

    q, k, v = put(query), put(key), put(value)
    more: dict[str, Any]
    if rule == "ssd":
        rates = -torch.arange(1, query.shape[1] + 1, device=key.device, dtype=key.dtype)
        more = {"initial_states": state, "return_final_states": True} if returns_state else {}
        result = kernel(v, put(beta), rates, k, q, **{names.get(x, x): more[x] for x in more})
    else:
        more = {"beta": put(beta)} if rule in ("delta", "gated_delta", "kda") else {}
        if rule == "rwkv7":
            unit = F.normalize(key, dim=-1)
            more = {"a": put(-unit), "b": put(beta * unit)}
        if rule not in ("linear", "delta"):
            more["g"] = put(decay[..., 0]) if rule == "gated_delta" else put(decay)
        if returns_state:
            more |= {"initial_state": state, "output_final_state": True}
        more |= options
        result = kernel(q, k, v, **{names.get(x, x): more[x] for x in more})
    out, final = result if returns_state else (result, None)
    return put(out), final


def _reasons_against(
    query: Tensor, key: Tensor, value: Tensor, mask: Tensor, *, returns_state: bool, **settings: object
) -> tuple[str, ...]:
    """Return the reasons why a recurrent kernel cannot take the inputs; empty if it can."""
    q_len, kv_len = mask.shape[2:]
    if 0 in mask.shape or q_len > kv_len:
        return ("takes no empty inputs, and no more queries than keys",)
    causal = torch.ones(q_len, kv_len, dtype=torch.bool, device=mask.device).tril(kv_len - q_len)
    if not bool((mask == causal).all()):
        return ("takes only causal masks",)
    return () if returns_state or q_len == kv_len else ("takes no state, and therefore no earlier keys",)
