"""One call of attention that several sides compute."""

from __future__ import annotations

import dataclasses
from functools import cached_property

import torch
from torch import Tensor

from saccade.masks import Causal, Mask


@dataclasses.dataclass(frozen=True)
class Problem:
    """A problem to time; its inputs are random, the same in every run, and drawn on first use.

    Attributes:
        mask: the pairs that may attend; all if None.
        batch, heads, n, dim: sizes of the queries.
        kv_heads: heads of keys and values; as many as of queries if None.
        dtype: of all inputs.
        dropout_p: of the weights.
        backward: whether gradients of query, key and value are computed, too.
    """

    mask: Mask | None = None
    batch: int = 1
    heads: int = 8
    n: int = 8192
    dim: int = 64
    kv_heads: int | None = None
    dtype: torch.dtype = torch.float32
    dropout_p: float = 0.0
    backward: bool = False

    @cached_property
    def tensors(self) -> list[Tensor]:
        """Query, key and value."""
        torch.manual_seed(0)
        heads = (self.heads, self.kv_heads or self.heads, self.kv_heads or self.heads)
        made = (torch.randn(self.batch, own, self.n, self.dim).to(self.dtype) for own in heads)
        return [x.requires_grad_(self.backward) for x in made]

    @cached_property
    def grad(self) -> Tensor:
        """The gradient of the output."""
        torch.manual_seed(1)
        return torch.randn(self.batch, self.heads, self.n, self.dim).to(self.dtype)

    @cached_property
    def allowed(self) -> Tensor | None:
        """The dense mask: bool ``[batch or 1, heads or 1, n, n]``."""
        return None if self.mask is None else self.mask.to_dense(self.n)

    @cached_property
    def terms(self) -> Tensor | None:
        """The dense mask as terms to add, 0 and -inf, which SDPA would compute from a bool mask in every call."""
        if self.allowed is None:
            return None
        return torch.zeros(self.allowed.shape, dtype=self.dtype).masked_fill_(~self.allowed, -torch.inf)

    @property
    def pairs(self) -> float:
        """Number of pairs that may attend, over all heads."""
        share = 1.0 if self.mask is None else self.mask.density(self.n)
        return share * self.batch * self.heads * self.n * self.n

    @property
    def dense_pairs(self) -> float:
        """Number of pairs that SDPA computes without a dense mask."""
        return self.pairs if self.mask == Causal() else float(self.batch * self.heads * self.n * self.n)

    @property
    def flops(self) -> float:
        """FLOPs of the products with visible pairs: two forward, five backward."""
        return 2.0 * self.dim * self.pairs * (7 if self.backward else 2)

    @property
    def is_grouped(self) -> bool:
        """True if several query heads share keys."""
        return self.kv_heads not in (None, self.heads)
