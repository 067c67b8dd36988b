"""Draw: the random numbers of one check, which follow from a seed and from nothing else."""

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
        name: of the claim: two claims of the same run draw independently.

    Attributes:
        used: whether anything was drawn. A check that draws nothing says the same for every seed.
    """

    def __init__(self, seed: int, name: str):
        entropy = np.random.SeedSequence([seed, zlib.crc32(name.encode())])
        self._generator = torch.Generator().manual_seed(int(entropy.generate_state(1, np.uint64)[0]) >> 1)
        self.used = False

    def normal(self, *shape: int) -> Tensor:
        """Independent normal numbers of mean 0 and variance 1."""
        self.used = True
        return torch.randn(shape, dtype=torch.float64, generator=self._generator)

    def uniform(self, *shape: int) -> Tensor:
        """Independent numbers between 0 and 1."""
        self.used = True
        return torch.rand(shape, dtype=torch.float64, generator=self._generator)

    def permutation(self, n: int) -> Tensor:
        """The numbers below n in random order, int64 ``[n]``."""
        self.used = True
        return torch.randperm(n, generator=self._generator)

    def integer(self) -> int:
        """A number below 2³¹, for a function that takes a seed."""
        self.used = True
        return int(torch.randint(0, 1 << 31, (), generator=self._generator))

    def module(self, make: Callable[[], M]) -> M:
        """A float64 module whose parameters are drawn as it draws them itself; torch's own generator is left alone."""
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(self.integer())
            return make().double()
