"""Build a layer norm or a root-mean-square norm by name, and the root-mean-square norm itself."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from saccade.support.autograd_functions import is_eager_training, needs_plain_backward, recomputed_gradients
from saccade.support.validation import check_choice, check_number

Norm = Literal["layer", "layer_without_bias", "rms"]


class RMSNorm(nn.RMSNorm):
    """Torch's root-mean-square norm, whose gradients on CPUs take fewer passes."""

    def forward(self, x: Tensor) -> Tensor:
        """Return x divided by the root of its mean square over the last axis, times the weights."""
        weight, shape = self.weight, self.normalized_shape
        if not torch.is_grad_enabled() or weight is None or len(shape) != 1 or x.shape[-1:] != shape:
            return super().forward(x)
        if not is_eager_training(x, weight):
            return super().forward(x)
        out: Tensor = _RootMeanSquare.apply(x, weight, torch.finfo(x.dtype).eps if self.eps is None else self.eps)
        return out


class _RootMeanSquare(torch.autograd.Function):
    """Autograd function of the norm, whose backward pass reads its inputs as few times as torch's operations allow."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, eps: float) -> Tensor:
        width = x.shape[-1]
        scale = torch.linalg.vector_norm(x, dim=-1, keepdim=True).square_().div_(width).add_(eps).rsqrt_()
        ctx.save_for_backward(x, weight, scale)
        ctx.eps = eps
        return _plain(x, weight, eps)  # the same numbers as without gradients

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        x, weight, scale = ctx.saved_tensors
        if needs_plain_backward(grad):
            plain = partial(_plain, eps=ctx.eps)
            return *recomputed_gradients(plain, (x, weight), ctx.needs_input_grad[:2], grad), None
        products = (grad * x).flatten(0, -2)
        of_weight = products.mT @ scale.flatten()
        along = (products @ weight).view_as(scale) * scale.pow(3) / -x.shape[-1]
        return (grad * scale).mul_(weight).addcmul_(x, along), of_weight, None


def _plain(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    return F.rms_norm(x, weight.shape, weight, eps)


NORMS: dict[str, Callable[[int, float], nn.Module]] = {
    "layer": nn.LayerNorm,
    "layer_without_bias": lambda embed_dim, eps: nn.LayerNorm(embed_dim, eps, bias=False),
    "rms": RMSNorm,
}


def make_norm(norm: str, embed_dim: int, norm_eps: float) -> nn.Module:
    """Build a norm over the last axis: a layer norm (with or without a bias) or a root-mean-square norm.

    Raises:
        ValueError: the name is unknown, or ``norm_eps`` is not a number above 0.
    """
    return NORMS[check_choice("norm", norm, NORMS)](embed_dim, check_number("norm_eps", norm_eps, above=0))
