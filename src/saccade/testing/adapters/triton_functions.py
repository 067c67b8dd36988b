"""The adapter for Triton functions, which are launched on a grid. On a CPU, Triton's interpreter runs them."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor

from saccade.support.validation import check_int
from saccade.testing.adapters.calling_convention import Form


def triton_function(kernel: Any, *, block_q: int = 16, constants: Mapping[str, Any] | None = None) -> Form:
    """Adapt a ``@triton.jit`` function that computes attention for a block of queries of one head.

    The function is launched on the grid ``(ceil(q_len / BLOCK_Q), batch * heads)`` with contiguous tensors, like this::

        kernel[grid](query, key, value, mask, out, heads, kv_heads, q_len, kv_len, scale,
                     HEAD_DIM=..., VALUE_DIM=..., BLOCK_Q=..., **constants)

    Tensors are ``[batch, heads, len, dim]``, the mask is int8 ``[batch, heads, q_len, kv_len]`` with 1 = may attend,
    and ``out`` is filled with NaN. On a CPU, set ``TRITON_INTERPRET=1`` before torch is imported. Gradients are not
    tested. To test them, combine the function with a backward pass in an autograd function, and use `layout`.

    Args:
        kernel: the Triton function.
        block_q: the value of the constant BLOCK_Q.
        constants: further constants, such as ``{"BLOCK_KV": 32}``.
    """
    settings = {"block_q": check_int("block_q", block_q), "constants": dict(constants or {})}
    return Form(kernel, run, _reasons_against, settings, ("scale",), gradients=False)


def run(
    kernel: Any,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    mask: Tensor,
    *,
    block_q: int,
    constants: Mapping[str, Any],
    scale: float | None = None,
) -> Tensor:
    """Launch the Triton function and return its output."""
    batch, heads, q_len, head_dim = query.shape
    out = torch.full((batch, heads, q_len, value.shape[3]), torch.nan, dtype=query.dtype, device=query.device)
    tensors = [x.contiguous() for x in (query, key, value, mask.to(torch.int8))]
    factor = head_dim**-0.5 if scale is None else scale
    sizes = (heads, key.shape[1], q_len, key.shape[2], factor)
    launch: Callable[..., Any] = kernel[(-(-q_len // block_q), batch * heads)]
    launch(*tensors, out, *sizes, HEAD_DIM=head_dim, VALUE_DIM=value.shape[3], BLOCK_Q=block_q, **constants)
    return out


def _reasons_against(query: Tensor, key: Tensor, value: Tensor, mask: Tensor, **settings: object) -> tuple[str, ...]:
    """Return the reasons why the Triton function cannot take the inputs; empty if it can."""
    reasons = []
    if 0 in mask.shape:
        reasons.append("takes no empty inputs")
    if torch.is_grad_enabled() and any(x.requires_grad for x in (query, key, value)):
        reasons.append("has no gradients")
    widths = (query.shape[3], value.shape[3])
    if any(width & (width - 1) for width in widths):
        reasons.append("takes only widths that are powers of two")
    return tuple(reasons)
