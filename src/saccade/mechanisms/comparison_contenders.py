"""The inputs of compare(), and two of the contenders: exact attention under a mask, and torch's attention."""

from __future__ import annotations

import math
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn import functional as F

from saccade.masks import Causal, Full, Mask, as_mask
from saccade.masks.convert.patterns import describe as standard_pattern
from saccade.matrix import AttentionMatrix
from saccade.mechanisms.base import Mechanism
from saccade.mechanisms.softmax import Softmax
from saccade.positions.token_positions import GivenPositions
from saccade.support.errors import value_error
from saccade.support.language import Message

_LARGEST_MASK = 1 << 30  # largest mask tensor for torch's SDPA, in bytes


class Case(NamedTuple):
    """The tensors and mask on which mechanisms are compared."""

    query: Tensor
    key: Tensor
    value: Tensor
    mask: object

    def at(self, length: int) -> Case:
        """Return the case with a different number of keys. Tokens are cut off or repeated."""
        q_len, kv_len = self.query.shape[2], self.key.shape[2]
        if length == kv_len:
            return self
        q = torch.arange(max(1, length * q_len // kv_len), device=self.query.device) % q_len
        kv = torch.arange(length, device=self.query.device) % kv_len
        return Case(self.query[:, :, q], self.key[:, :, kv], self.value[:, :, kv], self.mask)

    def run(self, contender: Mechanism | TorchSDPA) -> Tensor:
        """Return the output of a mechanism, or of torch's attention, for the tensors of the case."""
        if isinstance(contender, TorchSDPA):
            return contender(self)
        return contender(self.query, self.key, mask=self.mask) @ self.value


class Masked(Softmax):
    """Exact attention under an additional mask, which stands for this mask in a comparison."""

    def __init__(self, rule: Mask):
        super().__init__()
        self.rule = rule

    def forward(
        self,
        query: Tensor,
        key: Tensor,
        *,
        mask: object = None,
        q_positions: GivenPositions = None,
        kv_positions: GivenPositions = None,
    ) -> AttentionMatrix:
        rule = self.rule
        if mask is not None:
            rule = as_mask(mask, (*query.shape[:3], key.shape[2])) & rule
        return super().forward(query, key, mask=rule, q_positions=q_positions, kv_positions=kv_positions)


class TorchSDPA:
    """Torch's ``F.scaled_dot_product_attention`` in a comparison.

    Unless torch has a flag for the mask, the mask is converted to a tensor before the product is timed.
    """

    def __init__(self, rule: Mask):
        self.rule = rule
        self._prepared: tuple[tuple[int, int], Tensor | None] | None = None

    def reasons(self, case: Case) -> tuple[str, ...]:
        """Return the reasons why torch's SDPA cannot run on the tensors of a comparison."""
        dtypes = {x.dtype for x in (case.query, case.key, case.value)}
        if len(dtypes) > 1:
            return (Message("it takes tensors of one dtype; got {dtypes}", dtypes=", ".join(sorted(map(str, dtypes)))),)
        size = self._mask_bytes(case)
        if size > _LARGEST_MASK:
            return (Message("its mask would be a tensor of {size:.1f} GiB", size=size / 2**30),)
        return ()

    def __call__(self, case: Case) -> Tensor:
        mask = self.prepare(case)
        is_grouped = case.query.shape[1] != case.key.shape[1]
        is_causal = self._is_causal(case)
        return F.scaled_dot_product_attention(
            case.query, case.key, case.value, mask, is_causal=is_causal, enable_gqa=is_grouped
        )

    def prepare(self, case: Case) -> Tensor | None:
        """Return the mask as a tensor, or None if torch needs none. The tensor is cached until the length changes.

        Raises:
            ValueError: the tensor would be too large.
        """
        sizes = case.query.shape[2], case.key.shape[2]
        if self._prepared is None or self._prepared[0] != sizes:
            size = self._mask_bytes(case)
            if size > _LARGEST_MASK:
                raise value_error("mask", f"have a tensor of at most {_LARGEST_MASK} bytes", size)
            self._prepared = None  # free the previous tensor first
            self._prepared = sizes, self.rule.to_dense(*sizes).to(case.query.device) if size else None
        return self._prepared[1]

    def _mask_bytes(self, case: Case) -> int:
        """Return the size in bytes of the mask as a tensor, or 0 if torch needs none."""
        if isinstance(standard_pattern(self.rule), Full) or self._is_causal(case):
            return 0
        return math.prod(self.rule.shape) * case.query.shape[2] * case.key.shape[2]

    def _is_causal(self, case: Case) -> bool:
        return isinstance(standard_pattern(self.rule), Causal) and case.query.shape[2] == case.key.shape[2]
