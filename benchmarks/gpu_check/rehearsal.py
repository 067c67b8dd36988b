"""Stand-ins for what only a GPU runs, so that every line of the check can be executed on a processor.

`pretend` changes classes of saccade and functions of torch in this process, which is that of one step.
"""

from __future__ import annotations

from contextlib import ExitStack
from typing import Any
from unittest.mock import patch

import torch
from torch import Tensor
from torch.nn.attention import flex_attention as flex
from torch.nn.attention import varlen

__all__ = ["faulty_cudnn", "faulty_varlen", "packed_attention", "pretend"]

_LOWEST = -88.7  # ln of the largest float32: cuDNN's backward pass overflows below it


def pretend() -> ExitStack:
    """Let `varlen` and `flex` run on a processor, uncompiled; closing the result undoes it."""
    undo = ExitStack()
    changes: dict[str, Any] = {
        "saccade.engine.kernels.flex.Flex.devices": ("cpu",),
        "saccade.engine.kernels.flex.Flex.function": lambda self: flex.flex_attention,
        "saccade.engine.kernels.varlen.Varlen.devices": ("cpu",),
    }
    for place, value in changes.items():
        undo.enter_context(patch(place, value))
    undo.enter_context(patch.object(flex, "_validate_device", lambda query, key, value: None))
    undo.enter_context(patch.object(varlen, "varlen_attn", packed_attention))
    return undo


def packed_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    cu_seq_q: Tensor,
    cu_seq_k: Tensor,
    max_q: int,
    max_k: int,
    *,
    return_aux: varlen.AuxRequest | None = None,
    scale: float | None = None,
    window_size: tuple[int, int] = (-1, -1),
    enable_gqa: bool = False,
) -> Any:
    """Compute what varlen_attn does, one sequence at a time; tensors are ``[tokens, heads, width]``."""
    del cu_seq_k, max_k
    assert enable_gqa or query.shape[1] == key.shape[1]
    left, right = (max_q if side < 0 else side for side in window_size)
    outs, lses = [], []
    for start, stop in zip(cu_seq_q[:-1].tolist(), cu_seq_q[1:].tolist(), strict=True):
        distance = torch.arange(stop - start)[:, None] - torch.arange(stop - start)
        q, k, v = (x[start:stop].transpose(0, 1).float() for x in (query, key, value))
        k, v = (x.repeat_interleave(len(q) // len(k), 0) for x in (k, v))
        scores = (q @ k.mT * (q.shape[2] ** -0.5 if scale is None else scale)).masked_fill(
            (distance > left) | (distance < -right), -torch.inf
        )
        outs.append((scores.softmax(-1) @ v).transpose(0, 1))
        lses.append(scores.logsumexp(-1))
    out = torch.cat(outs).to(query.dtype)
    return (out, torch.cat(lses, 1)) if return_aux is not None and return_aux.lse else out


class _WithoutGradients(torch.autograd.Function):
    """The identity, whose gradient is NaN in some rows along an axis."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, axis: int, first: int) -> Tensor:
        ctx.place = (axis, first)
        return x.clone()

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None, None]:
        axis, first = ctx.place
        rows = torch.arange(first, grads[0].shape[axis])
        return grads[0].index_fill(axis, rows, torch.nan), None, None


def faulty_cudnn(query: Tensor, key: Tensor, value: Tensor, mask: Tensor) -> Tensor:
    """Compute attention with the fault of cuDNN (pytorch#196678): NaN in the query's gradient."""
    scores = (query.float() @ key.float().mT * query.shape[3] ** -0.5).masked_fill(~mask, -torch.inf)
    if query.shape[2] % 128 == 64 and bool((scores.logsumexp(-1) < _LOWEST).any()):
        query = _WithoutGradients.apply(query, 2, 0)
    scores = (query.float() @ key.float().mT * query.shape[3] ** -0.5).masked_fill(~mask, -torch.inf)
    return (scores.softmax(-1) @ value.float()).to(query.dtype)


def faulty_varlen(query: Tensor, key: Tensor, value: Tensor, ends: Tensor, longest: int) -> Tensor:
    """Compute attention with the fault of varlen_attn (pytorch#176793): gradients that nobody wrote."""
    end = int(ends[-1])
    q, k, v = (_WithoutGradients.apply(x, 0, end) for x in (query, key, value))
    out = packed_attention(q[:end], k[:end], v[:end], ends, ends, longest, longest, window_size=(-1, 0))
    return torch.cat([out, torch.full_like(q[end:], torch.nan)])
