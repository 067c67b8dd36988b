"""FlexAttention compiled, for a few masks, since each compilation takes seconds."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache
from typing import Any

import torch
from torch import Tensor
from torch.nn.attention.flex_attention import create_block_mask, flex_attention

from benchmarks.peers.peer import Peer, named
from saccade.testing.case import Case

__all__ = ["COMPILED", "FEW", "attend"]

FEW = ("oracle", "polarity", "linear", "pure", "determinism", "sizes", "size-65", "size-127")
"""Laws and cases at the sizes of models: every new shape is compiled for seconds."""


def attend(query: Tensor, key: Tensor, value: Tensor, mask: Tensor, *, scale: float | None = None) -> Tensor:
    """Pass the mask as a ``mask_mod`` to the compiled function.

    Raises:
        NotImplementedError: a gradient, which the CPU code does not compute, or no entries.
    """
    if query.device.type == "cpu" and torch.is_grad_enabled() and any(x.requires_grad for x in (query, key, value)):
        raise NotImplementedError("has no gradients on the CPU")
    if 0 in mask.shape:
        raise NotImplementedError("takes no empty inputs")

    def allows(b: Tensor, h: Tensor, q: Tensor, kv: Tensor) -> Tensor:
        return mask[b, h, q, kv]

    batch, heads, q_len, kv_len = mask.shape
    blocks = create_block_mask(allows, batch, heads, q_len, kv_len, device=str(mask.device))
    with torch._dynamo.config.patch(recompile_limit=64, fail_on_recompile_limit_hit=True):
        out = _compiled()(query, key, value, block_mask=blocks, scale=scale, enable_gqa=True)
    assert isinstance(out, Tensor)
    return out


@cache
def _compiled() -> Any:
    return torch.compile(flex_attention, dynamic=False)


def _cases() -> Sequence[Case]:
    return named("none", "causal", "padding", "nothing")


COMPILED = Peer("torch.compile(flex_attention)", attend, gqa=True, dtype=torch.float32, cases=_cases)
