"""Attention of few tokens without options, for which checking everything takes longer than computing the output."""

from __future__ import annotations

from functools import partial
from typing import Any, cast

import torch
from torch import Tensor
from torch.nn import Parameter

from saccade.engine.autograd import refuse_batched
from saccade.engine.dispatch import attend
from saccade.engine.inputs import AttentionInputs
from saccade.engine.kernels import aten_flash
from saccade.masks import Causal
from saccade.support.autograd_functions import recomputed_gradients
from saccade.support.numerics import is_finite
from saccade.support.torch_modes import any_autocast, is_tracing, is_transformed, num_dispatch_modes

_MOST = 1 << 15  # pairs over all batch items and heads
_DTYPES = (torch.float32, torch.bfloat16)
_KINDS = frozenset((Tensor, Parameter))
_CAUSAL = Causal()
_num_function_modes = torch._C._len_torch_function_stack
_is_scripted = torch._C._is_tracing


def short_attention(query: Tensor, key: Tensor, value: Tensor, is_causal: bool) -> Tensor | None:
    """Return the attention output of short sequences on a CPU in float32 or bfloat16; None for all other inputs.

    None is also returned if the inputs may contain NaN, inf or numbers that overflow, which `attend` contains.

    Args:
        query, key, value: as in `saccade.attention`, not checked yet.
        is_causal: whether the mask is causal; if not, all pairs are visible.

    It runs torch's flash operation, as `saccade.engine.kernels.fused` does for the same inputs.
    """
    if is_tracing() or num_dispatch_modes() or is_transformed() or any_autocast() or not _are_plain(query, key, value):
        return None
    batch, heads, q_len, width = query.shape
    kv_len = key.shape[2]
    is_masked = is_causal and q_len > 1
    if not 0 < batch * heads * q_len * kv_len <= _MOST or not width or (is_masked and q_len != kv_len):
        return None
    if torch.is_grad_enabled() and (query.requires_grad or key.requires_grad or value.requires_grad):
        if query.dtype is not torch.float32:
            return None
        return cast("Tensor | None", _ShortProduct.apply(query, key, value, width**-0.5, is_masked))
    results = aten_flash.forward_of_short(query, key, value, is_masked, width**-0.5)
    return None if results is None else results[0]


def _are_plain(query: Tensor, key: Tensor, value: Tensor) -> bool:
    """Return whether the arguments are ordinary tensors with the same dtype, width and number of heads on a CPU."""
    return (
        type(query) in _KINDS
        and type(key) in _KINDS
        and type(value) in _KINDS
        and query.dim() == key.dim() == 4
        and query.dtype is key.dtype is value.dtype
        and query.dtype in _DTYPES
        and query.is_cpu
        and key.is_cpu
        and value.is_cpu
        and key.shape == value.shape
        and (query.shape == key.shape or (query.shape[:2] == key.shape[:2] and query.shape[3] == key.shape[3]))
        and not (_num_function_modes() or _is_scripted())
        and torch.autograd.forward_ad._current_level < 0
        and aten_flash.is_available()
    )


class _ShortProduct(torch.autograd.Function):
    """Autograd function of `short_attention`."""

    @staticmethod
    def forward(ctx: Any, query: Tensor, key: Tensor, value: Tensor, scale: float, is_masked: bool) -> Tensor | None:
        results = aten_flash.forward_of_short(query, key, value, is_masked, scale)
        if results is None:
            return None
        ctx.save_for_backward(query, key, value, *results)
        ctx.scale, ctx.is_masked = scale, is_masked
        return results[0]

    @staticmethod
    def backward(ctx: Any, grad_out: Tensor) -> tuple[Tensor | None, ...]:
        refuse_batched(grad_out)
        query, key, value, out, lse = ctx.saved_tensors
        if not torch.is_grad_enabled():
            grads = aten_flash.backward(grad_out, query, key, value, out, lse, None, ctx.is_masked, ctx.scale)
            # A masked pair has weight 0, and 0 * inf is NaN. Whatever is not finite reaches the gradient of its query.
            if not ctx.is_masked or is_finite(grads[0]):
                return *grads, None, None
        again = partial(_attend, is_masked=ctx.is_masked)
        return *recomputed_gradients(again, (query, key, value), ctx.needs_input_grad[:3], grad_out), None, None


def _attend(query: Tensor, key: Tensor, value: Tensor, is_masked: bool) -> Tensor:
    """Compute the output with all checks, which contain NaN and inf, and with second derivatives."""
    return attend(AttentionInputs.of(query, key, _CAUSAL if is_masked else None), value)[0]
