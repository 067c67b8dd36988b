"""``Attend`` of x-transformers."""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
from torch import Tensor

from benchmarks.peers.adapters import causal_with_padding
from benchmarks.peers.peer import Library, Peer, imported

__all__ = ["X_TRANSFORMERS", "eager", "flash"]


def eager(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    mask: Tensor,
    *,
    bias: Tensor | None = None,
    scale: float | None = None,
    softcap: float | None = None,
    sink_logit: Tensor | None = None,
    causal: bool = False,
) -> Tensor:
    """Call ``Attend()``; with ``causal=True`` the flag sets causality, and the mask sets padding."""
    if softcap is not None and bias is not None:
        raise NotImplementedError("adds a bias before the softcap, not after it")
    capped = {} if softcap is None else {"softclamp_logits": True, "logit_softclamp_value": softcap}
    module = _attend(
        scale=scale, causal=causal, heads=query.shape[1], head_learned_sink=sink_logit is not None, **capped
    )
    if sink_logit is not None:
        del module.head_attn_sink  # replace the parameter by the logits
        module.head_attn_sink = _theirs(sink_logit, 0, key.shape[1])
    return _call(module, query, key, value, mask, bias)


def flash(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    mask: Tensor,
    *,
    bias: Tensor | None = None,
    scale: float | None = None,
    causal: bool = False,
) -> Tensor:
    """Call ``Attend(flash=True)``."""
    return _call(_attend(scale=scale, causal=causal, flash=True), query, key, value, mask, bias)


def _call(module: Any, query: Tensor, key: Tensor, value: Tensor, mask: Tensor, bias: Tensor | None) -> Tensor:
    groups = key.shape[1]
    key_mask: Tensor | None = _theirs(mask, 1, groups)
    if module.causal:
        tokens = causal_with_padding(mask)
        key_mask = None if bool(tokens.all()) else tokens
    if bias is not None and bias.shape[1] > 1:
        bias = _theirs(bias, 1, groups)
    out, _ = module(_theirs(query, 1, groups), key, value, mask=key_mask, attn_bias=bias)
    return out.unflatten(1, (-1, groups)).transpose(1, 2).flatten(1, 2)


def _theirs(x: Tensor, axis: int, groups: int) -> Tensor:
    """Reorder heads: head h reads group ``h % groups`` with them, ``h // (heads // groups)`` with us."""
    return x.unflatten(axis, (groups, -1)).transpose(axis, axis + 1).flatten(axis, axis + 1)


def _attend(**options: Any) -> Any:
    return imported("x_transformers.attend").Attend(**options)


def _eager(call: str, causal: bool) -> Peer:
    # It always computes softmax in float32.
    return Peer(call, partial(eager, causal=causal), gqa=True, dtype=torch.float32, left_out=("gradcheck",))


X_TRANSFORMERS = Library(
    "x-transformers",
    "x-transformers",
    (
        _eager("Attend()(q, k, v, mask)", causal=False),
        Peer("Attend(flash=True)(q, k, v, mask)", flash, gqa=True),
        _eager("Attend(causal=True)(q, k, v, mask)", causal=True),
        Peer("Attend(causal=True, flash=True)(q, k, v, mask)", partial(flash, causal=True), gqa=True),
    ),
)
