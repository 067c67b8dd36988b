"""Draw: the random numbers of one check, determined by a seed."""

from __future__ import annotations

import zlib
from collections.abc import Callable
from typing import TypeVar

import numpy as np
import torch
from torch import Tensor, nn

__all__ = ["Draw"]

M = TypeVar("M", bound=nn.Module)


class Draw:
    """Random tensors in float64, for one claim and one seed.

    Args:
        seed: of the run.
        name: of the claim; two claims with one seed draw independently.

    Attributes:
        used: whether anything was drawn. A check without random numbers gives the same result for every seed.
    """

    def __init__(self, seed: int, name: str):
        entropy = np.random.SeedSequence([seed, zlib.crc32(name.encode())])
        self._generator = torch.Generator().manual_seed(int(entropy.generate_state(1, np.uint64)[0]) >> 1)
        self.used = False

    def normal(self, *shape: int) -> Tensor:
        """Draw independent normal numbers with mean 0 and variance 1."""
        self.used = True
        return torch.randn(shape, dtype=torch.float64, generator=self._generator)

    def uniform(self, *shape: int) -> Tensor:
        """Draw independent numbers between 0 and 1."""
        self.used = True
        return torch.rand(shape, dtype=torch.float64, generator=self._generator)

    def permutation(self, n: int) -> Tensor:
        """Draw a permutation of the numbers below n, int64 ``[n]``."""
        self.used = True
        return torch.randperm(n, generator=self._generator)

    def integer(self) -> int:
        """Draw a number below 2³¹, for a function that takes a seed."""
        self.used = True
        return int(torch.randint(0, 1 << 31, (), generator=self._generator))

    def module(self, make: Callable[[], M]) -> M:
        """Build a float64 module with its usual initial parameters, without changing torch's generator."""
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(self.integer())
            return make().double()
