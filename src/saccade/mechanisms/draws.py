"""Directions of a numbered draw: the same ones wherever they are asked for, in traced programs too."""

from __future__ import annotations

from functools import lru_cache
from typing import Any

import numpy as np
import torch
from torch import Tensor

from saccade.mechanisms.random_features import directions

__all__ = ["drawn", "drawn_unread"]


def drawn(seed: int, number: int, num_features: int, head_dim: int, *, orthogonal: bool) -> Tensor:
    """The directions of a draw, float64 ``[num_features, head_dim]``: a function of seed, number and width."""
    entropy = np.random.SeedSequence([seed, number, head_dim])
    generator = torch.Generator().manual_seed(int(entropy.generate_state(1, np.uint64)[0]) >> 1)
    return directions(num_features, head_dim, orthogonal=orthogonal, generator=generator)


def drawn_unread(seed: int, number: Tensor, num_features: int, head_dim: int, *, orthogonal: bool) -> Tensor:
    """The same where nobody may look at the number: one operation, which looks when the program runs."""
    return _operation(number, str(seed), num_features, head_dim, orthogonal)  # a seed may exceed 64 bits


_kept = lru_cache(maxsize=128)(drawn)  # layers and calls


@torch.library.custom_op("saccade::drawn_directions", mutates_args=())
def _operation(number: Tensor, seed: str, num_features: int, head_dim: int, orthogonal: bool) -> Tensor:
    return _kept(int(seed), int(number), num_features, head_dim, orthogonal=orthogonal).clone()


@_operation.register_fake
def _(number: Tensor, seed: str, num_features: int, head_dim: int, orthogonal: bool) -> Tensor:
    del number, seed, orthogonal
    return torch.empty(num_features, head_dim, dtype=torch.float64, device="cpu")


@_operation.register_vmap
def _(info: Any, in_dims: tuple[int | None, ...], number: Tensor, *others: Any) -> tuple[Tensor, int]:
    del info
    each = number.unbind(in_dims[0] or 0)  # modules side by side, each with draws of its own
    return torch.stack([_operation(one, *others) for one in each]), 0
