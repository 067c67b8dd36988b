"""A function of tensors with and without fusion: outputs and gradients."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from saccade.fusion import AttentionCall, FuseAttention


class Result(NamedTuple):
    """Output, gradients by the leaves, and the attention calls that were run."""

    out: Tensor
    grads: tuple[Tensor, ...]
    calls: list[AttentionCall]


def run(function: Callable[[], Tensor], leaves: Sequence[Tensor], *, fused: bool) -> Result:
    """Return the results of a function; the gradients are those of a sum with fixed random weights."""
    calls: list[AttentionCall] = []
    if fused:
        with FuseAttention(on_attention=calls.append):
            out = function()
    else:
        out = function()
    weights = torch.randn(out.shape, generator=torch.Generator().manual_seed(1), dtype=torch.float64).to(out.dtype)
    grads = torch.autograd.grad((out * weights).sum(), leaves, allow_unused=True) if out.requires_grad else ()
    return Result(out, tuple(torch.zeros(()) if x is None else x for x in grads), calls)


def assert_agrees(function: Callable[[], Tensor], leaves: Sequence[Tensor] = (), *, calls: int | None = None) -> Result:
    """Assert that outputs and gradients are the same with fusion, to rounding; exactly if nothing was fused.

    Args:
        function: returns the output.
        leaves: tensors that gradients are taken of.
        calls: number of attention calls expected; any if None.
    """
    plain, fused = run(function, leaves, fused=False), run(function, leaves, fused=True)
    if calls is not None:
        assert len(fused.calls) == calls
    assert fused.out.dtype == plain.out.dtype
    assert fused.out.shape == plain.out.shape
    assert fused.out.requires_grad == plain.out.requires_grad
    exact = {"atol": 0.0, "rtol": 0.0} if not fused.calls else {}
    for ours, theirs in zip((fused.out, *fused.grads), (plain.out, *plain.grads), strict=True):
        torch.testing.assert_close(ours, theirs, equal_nan=True, **exact)
    return fused
