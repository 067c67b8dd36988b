"""Modules with random parameters that come from a seed alone."""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeVar

import torch
from torch import nn

__all__ = ["seeded"]

_Module = TypeVar("_Module", bound=nn.Module)


def seeded(build: Callable[[], _Module], seed: int = 0) -> _Module:
    """A module with normal random numbers for parameters; torch's own generator stays where it was.

    Whatever starts at zero would hide a mistake.
    """
    with torch.random.fork_rng(devices=()):
        module = build()
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in module.parameters():
            parameter.copy_(torch.randn(parameter.shape, generator=generator, dtype=torch.float64))
    return module
