"""The ``Attend`` of x-transformers in the kit's calling convention."""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
from torch import Tensor

from saccade.testing.peers.expressed import causal_with_padding
from saccade.testing.peers.peer import Library, Peer

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
    """``Attend()``; with ``causal=True`` the flag says what is causal, and the mask which keys are padding."""
    more: dict[str, Any] = {} if softcap is None else {"softclamp_logits": True, "logit_softclamp_value": softcap}
    module = _attend(scale=scale, causal=causal, heads=query.shape[1], head_learned_sink=sink_logit is not None, **more)
    if sink_logit is not None:
        del module.head_attn_sink  # a parameter, in whose place the logits that are given are read
        module.head_attn_sink = sink_logit
    return _asked(module, query, key, value, mask, bias, causal)


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
    """``Attend(flash=True)``."""
    return _asked(_attend(scale=scale, causal=causal, flash=True), query, key, value, mask, bias, causal)


def _asked(
    module: Any, query: Tensor, key: Tensor, value: Tensor, mask: Tensor, bias: Tensor | None, causal: bool
) -> Tensor:
    given: Tensor | None = mask
    if causal:
        tokens = causal_with_padding(mask)
        given = None if bool(tokens.all()) else tokens
    groups = key.shape[1]
    # Head h reads group h % groups here, and h // (heads // groups) with us.
    theirs = query.unflatten(1, (groups, -1)).transpose(1, 2).flatten(1, 2)
    if bias is not None and bias.shape[1] > 1:
        bias = bias.unflatten(1, (groups, -1)).transpose(1, 2).flatten(1, 2)
    if given is mask:
        given = mask.unflatten(1, (groups, -1)).transpose(1, 2).flatten(1, 2)
    if getattr(module, "head_learned_sink", False):
        module.head_attn_sink = module.head_attn_sink.unflatten(0, (groups, -1)).transpose(0, 1).flatten()
    out, _ = module(theirs, key, value, mask=given, attn_bias=bias)
    return out.unflatten(1, (-1, groups)).transpose(1, 2).flatten(1, 2)


def _attend(**options: Any) -> Any:
    from x_transformers.attend import Attend  # noqa: PLC0415  optional

    return Attend(**options)


X_TRANSFORMERS = Library(
    "x-transformers",
    "x-transformers",
    (
        Peer("Attend()(q, k, v, mask)", eager, gqa=True, dtype=torch.float32, left_out=("gradcheck",)),
        Peer("Attend(flash=True)(q, k, v, mask)", flash, gqa=True),
        Peer(
            "Attend(causal=True)(q, k, v, mask)",
            partial(eager, causal=True),
            gqa=True,
            dtype=torch.float32,
            left_out=("gradcheck",),
        ),
        Peer("Attend(causal=True, flash=True)(q, k, v, mask)", partial(flash, causal=True), gqa=True),
    ),
)
