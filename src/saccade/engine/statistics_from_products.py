r"""Entropy and column sums from products alone, for devices whose fast kernels compute nothing else.

.. math:: H_i = \mathrm{lse}_i - \sum_j A_{ij} s_{ij} = \mathrm{lse}_i - \mathrm{scale} \cdot q_i \cdot (A K)_i

so that one product with the keys as values is the entropy. And where queries and keys are exchanged and the lse of
query i is taken off its scores, the new lse of key j is the log of :math:`\sum_i \exp(s_{ij} - \mathrm{lse}_i)`: of the
sum of its column.
"""

from __future__ import annotations

import math
from collections.abc import Collection

import torch
from torch import Tensor

from saccade.engine.bias.term import DenseTerm
from saccade.engine.dispatch import attend_with_lse, choose_kernel
from saccade.engine.inputs import AttentionInputs
from saccade.engine.kernels.kernel import Kernel, Request
from saccade.engine.nonfinite import is_clean
from saccade.masks import Mask
from saccade.support.torch_modes import is_plain

NAMES = frozenset(["entropy", "received"])
_KERNELS = ("varlen", "flex")  # for which this is the fastest way: others read complete rows anyway
_LARGEST = 64.0  # of scores: their rounding, a few times 6e-8 of them, is all that the difference loses


def can_ask(inputs: AttentionInputs, impl: str | Kernel) -> bool:
    """Whether a kernel runs here that gives products alone, and the differences lose nothing that counts."""
    if not (is_plain(inputs.query) and is_plain(inputs.key)) or 0 in inputs.shape:
        return False
    if not inputs.is_plain or inputs.softcap is not None or inputs.sink_logit is not None:
        return False
    if choose_kernel(_wide(inputs), Request(impl=impl, needs_lse=True)).name not in _KERNELS:
        return False
    longest = torch.stack([torch.linalg.vector_norm(x, dim=-1, dtype=torch.float32).max() for x in _tensors(inputs)])
    return float(longest.prod()) * abs(inputs.scale) <= _LARGEST and is_clean(inputs, *_tensors(inputs))


@torch.no_grad()
def numbers(inputs: AttentionInputs, impl: str | Kernel, names: Collection[str]) -> dict[str, Tensor]:
    """Compute the requested statistics of `NAMES`; `can_ask` must hold.

    Args:
        inputs, impl: of the matrix.
        names: which.

    Returns:
        "entropy", in nats, ``[batch, heads, q_len]``, 0 for a row that sees nothing; "received", ``[batch, heads,
        kv_len]``, unless nobody knows the mask of keys and queries exchanged.

    Cost: one product, and one more for "received", with a copy of the keys for each head.
    """
    wide, found = _wide(inputs), {}
    exchanged = _transposed(inputs.rule) if "received" in names else None
    if "entropy" in names:
        seen, lse = attend_with_lse(wide, wide.key, Request(impl=impl))
        entropy = lse - inputs.scale * (wide.query * seen).sum(-1)
        found["entropy"] = entropy.masked_fill(lse == -math.inf, 0.0).clamp_min(0.0)
    elif exchanged is not None:
        lse = attend_with_lse(wide, wide.key.new_zeros(*wide.key.shape[:3], 1), Request(impl=impl))[1]
    if exchanged is not None:
        found["received"] = _received(wide, exchanged, lse, impl)
    return found


def _received(inputs: AttentionInputs, rule: Mask, lse: Tensor, impl: str | Kernel) -> Tensor:
    batch, heads, q_len, kv_len = inputs.shape
    exchanged = inputs.replaced(
        rule=rule,
        shape=(batch, heads, kv_len, q_len),
        origin=(inputs.origin[1], inputs.origin[0]),
        query=inputs.key.repeat_interleave(heads // inputs.key.shape[1], 1),
        key=inputs.query,
        bias=DenseTerm(-lse.masked_fill(lse == -math.inf, 0.0)[:, :, None]),
    )
    return attend_with_lse(exchanged, lse.new_zeros(batch, heads, q_len, 1), Request(impl=impl))[1].exp()


def _wide(inputs: AttentionInputs) -> AttentionInputs:
    """In float32 or wider, as all statistics are."""
    return inputs.replaced(
        query=inputs.query.to(inputs.compute_dtype), key=inputs.key.to(inputs.compute_dtype), dtype=inputs.compute_dtype
    )


def _tensors(inputs: AttentionInputs) -> tuple[Tensor, Tensor]:
    return inputs.query, inputs.key


def _transposed(rule: Mask) -> Mask | None:
    from saccade.masks.convert.patterns import transposed  # noqa: PLC0415  knows masks that a product need not

    return transposed(rule)
