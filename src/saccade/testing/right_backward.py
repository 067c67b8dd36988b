"""Correct attention kernels with custom backward passes."""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

Array = npt.NDArray[Any]


def _forward(q: Tensor, k: Tensor, v: Tensor, mask: Tensor) -> tuple[Tensor, Tensor]:
    weights = (q @ k.mT * q.shape[3] ** -0.5).masked_fill(~mask, -torch.inf).softmax(-1)
    return weights @ v, weights


class _SavedWeights(torch.autograd.Function):
    """Attention that saves the attention weights for the backward pass."""

    @staticmethod
    def forward(ctx: Any, q: Tensor, k: Tensor, v: Tensor, mask: Tensor) -> Tensor:
        out, weights = _forward(q, k, v, mask)
        ctx.save_for_backward(q, k, v, weights)
        return out

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        q, k, v, weights = ctx.saved_tensors
        of_weights = gradients[0] @ v.mT
        of_scores = weights * (of_weights - (weights * of_weights).sum(-1, keepdim=True)) * q.shape[3] ** -0.5
        return of_scores @ k, of_scores.mT @ q, weights.mT @ gradients[0], None


class _ByVjp(torch.autograd.Function):
    """Attention whose backward pass reruns the forward pass inside `torch.func.vjp`."""

    @staticmethod
    def forward(ctx: Any, q: Tensor, k: Tensor, v: Tensor, mask: Tensor) -> Tensor:
        ctx.save_for_backward(q, k, v, mask)
        return _forward(q, k, v, mask)[0]

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        q, k, v, mask = ctx.saved_tensors
        results = torch.func.vjp(lambda q, k, v: _forward(q, k, v, mask)[0], q, k, v)
        return (*results[1](gradients[0]), None)


class _Numpy(torch.autograd.Function):
    """Attention with forward and backward passes in NumPy."""

    @staticmethod
    def forward(ctx: Any, q: Tensor, k: Tensor, v: Tensor, mask: Tensor) -> Tensor:
        arrays = [x.detach().cpu().numpy() for x in (q, k, v, mask)]
        weights = _weights(*(arrays[index] for index in (0, 1, 3)))
        ctx.save_for_backward(q, k, v, torch.from_numpy(weights))
        with np.errstate(invalid="ignore", over="ignore"):
            return torch.from_numpy(weights @ arrays[2]).to(q.device)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        q, k, v, weights, g = (x.detach().cpu().numpy() for x in (*ctx.saved_tensors, gradients[0]))
        with np.errstate(invalid="ignore", over="ignore"):
            of_weights = g @ v.swapaxes(-1, -2)
            of_scores = weights * (of_weights - (weights * of_weights).sum(-1, keepdims=True)) * q.shape[-1] ** -0.5
            by_input = (of_scores @ k, of_scores.swapaxes(-1, -2) @ q, weights.swapaxes(-1, -2) @ g)
        return (*(torch.from_numpy(x).to(gradients[0].device) for x in by_input), None)


def _weights(q: Array, k: Array, mask: Array) -> Array:
    with np.errstate(invalid="ignore", over="ignore"):  # laws pass NaN and inf
        scores = np.where(mask, q @ k.swapaxes(-1, -2) * q.shape[-1] ** -0.5, -np.inf).astype(q.dtype)
        powers = np.exp(scores - scores.max(-1, keepdims=True))
        shares: Array = powers / powers.sum(-1, keepdims=True)
        return shares


def with_saved_weights(q: Tensor, k: Tensor, v: Tensor, mask: Tensor) -> Tensor:
    """Compute attention, and save the attention weights for the backward pass."""
    out: Tensor = _SavedWeights.apply(q, k, v, mask)
    return out


def by_vjp(q: Tensor, k: Tensor, v: Tensor, mask: Tensor) -> Tensor:
    """Compute attention; the backward pass reruns the forward pass inside `torch.func.vjp`."""
    out: Tensor = _ByVjp.apply(q, k, v, mask)
    return out


def numpy_attention(q: Tensor, k: Tensor, v: Tensor, mask: Tensor) -> Tensor:
    """Compute attention with forward and backward passes in NumPy."""
    out: Tensor = _Numpy.apply(q, k, v, mask)
    return out
