"""Random features, whose dot products equal the softmax kernel on average."""

from __future__ import annotations

import math
from functools import lru_cache
from typing import Any, Literal

import numpy as np
import torch
from torch import Tensor

from saccade.mechanisms.features.feature_matrix import Features

Kind = Literal["positive", "hyperbolic", "trigonometric"]
KINDS: tuple[Kind, ...] = ("positive", "hyperbolic", "trigonometric")


def directions(num_features: int, head_dim: int, *, orthogonal: bool, generator: torch.Generator) -> Tensor:
    """Draw the directions ω of random features, each from a standard normal distribution.

    Orthogonal directions come in blocks of ``head_dim`` rows that are perpendicular to one another. Their norms are
    drawn separately, from the distribution of the norm of a normal vector. Each row by itself is then normally
    distributed, which keeps the kernel unbiased.

    Returns:
        float64 ``[num_features, head_dim]``, on the CPU.

    Reference: Choromanski et al. 2021, arXiv:2009.14794, section 2.4.
    """
    if not orthogonal or not head_dim:
        return torch.randn(num_features, head_dim, generator=generator, dtype=torch.float64)
    blocks = []
    for _ in range(-(-num_features // head_dim)):
        q, r = torch.linalg.qr(torch.randn(head_dim, head_dim, generator=generator, dtype=torch.float64))
        # The signs of the columns are arbitrary; multiplying by the signs of r makes every rotation equally likely.
        blocks.append((q * r.diagonal().sign()).mT)
    lengths = torch.randn(num_features, head_dim, generator=generator, dtype=torch.float64).norm(dim=1)
    return torch.cat(blocks)[:num_features] * lengths[:, None]


def random_features(x: Tensor, projection: Tensor, kind: Kind) -> Features:
    r"""Return random features φ(x), with :math:`E[\phi(x) \cdot \phi(y)] = e^{x \cdot y}` over draws of the projection.

    A "positive" feature is :math:`e^{\omega x - |x|^2/2}`. A "hyperbolic" feature is a pair of these, for ω and -ω. A
    "trigonometric" feature is :math:`e^{|x|^2/2}` times the sine and cosine of ωx.

    Args:
        x: ``[batch, heads, len, head_dim]``.
        projection: ω, ``[num_features, head_dim]``.
        kind: "positive", "hyperbolic" or "trigonometric".

    Returns:
        The values, ``[batch, heads, len, num_features]`` (twice as many features unless ``kind`` is "positive"), and,
        for each token, the logarithm of a constant that was divided out of its values to prevent overflow.

    Reference: Choromanski et al. 2021, arXiv:2009.14794, lemma 1 and equation 5.
    """
    projected = x @ projection.mT
    half = x.square().sum(-1, keepdim=True) / 2
    count = projection.shape[0]
    if kind == "trigonometric":
        logs = half.detach()
        # The factor has the value 1 and the gradient of exp(half).
        values = torch.cat([projected.sin(), projected.cos()], -1) * (half - logs).exp() / math.sqrt(count)
        return Features(values, logs[..., 0])
    if kind == "hyperbolic":
        projected, count = torch.cat([projected, -projected], -1), 2 * count
    peak = projected.detach().amax(-1, keepdim=True)
    logs, removed = peak - half.detach(), half - half.detach() + peak + math.log(count) / 2
    # The features are by far the largest tensors, so they are written only once if autograd allows it.
    values = (projected - removed).exp() if projected.requires_grad else projected.sub_(removed).exp_()
    return Features(values, logs[..., 0])


def drawn(seed: int, number: int, num_features: int, head_dim: int, *, orthogonal: bool) -> Tensor:
    """Return the random directions of the ``number``-th draw with a seed, float64 ``[num_features, head_dim]``."""
    entropy = np.random.SeedSequence([seed, number, head_dim])
    generator = torch.Generator().manual_seed(int(entropy.generate_state(1, np.uint64)[0]) >> 1)
    return directions(num_features, head_dim, orthogonal=orthogonal, generator=generator)


def drawn_at_run_time(seed: int, number: Tensor, num_features: int, head_dim: int, *, orthogonal: bool) -> Tensor:
    """Return random directions from a custom operation, for a traced program that reads ``number`` at run time."""
    return _operation(number, str(seed), num_features, head_dim, orthogonal)  # a seed may exceed 64 bits


_cached_draw = lru_cache(maxsize=128)(drawn)  # shared by layers and calls


@torch.library.custom_op("saccade::drawn_directions", mutates_args=())
def _operation(number: Tensor, seed: str, num_features: int, head_dim: int, orthogonal: bool) -> Tensor:
    return _cached_draw(int(seed), int(number), num_features, head_dim, orthogonal=orthogonal).clone()


@_operation.register_fake
def _(number: Tensor, seed: str, num_features: int, head_dim: int, orthogonal: bool) -> Tensor:
    return torch.empty(num_features, head_dim, dtype=torch.float64, device="cpu")


@_operation.register_vmap
def _(info: Any, in_dims: tuple[int | None, ...], number: Tensor, *others: Any) -> tuple[Tensor, int]:
    each = number.unbind(in_dims[0] or 0)  # several modules under vmap, each with its own draws
    return torch.stack([_operation(one, *others) for one in each]), 0
