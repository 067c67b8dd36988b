r"""Entropy and column sums of attention from products alone, for kernels that compute no weights (flex, varlen).

.. math:: H_i = \mathrm{lse}_i - \sum_j A_{ij} s_{ij} = \mathrm{lse}_i - \mathrm{scale} \cdot q_i \cdot (A K)_i

Therefore, one product with the keys as values is enough for the entropy. For column sums, queries and keys are
exchanged, and the lse of query i is subtracted from its scores. The new lse of key j is then the log of its column sum,
:math:`\sum_i \exp(s_{ij} - \mathrm{lse}_i)`.
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
_KERNELS = ("varlen", "flex")  # kernels for which this is fastest; others can compute complete rows
_LARGEST = 64.0  # largest score; the rounding error of differences is a few times 6e-8 of it


def can_use_products(inputs: AttentionInputs, impl: str | Kernel) -> bool:
    """Return whether the kernel and the inputs allow statistics to be computed from products."""
    if not (is_plain(inputs.query) and is_plain(inputs.key)) or 0 in inputs.shape:
        return False
    if not inputs.is_plain or inputs.softcap is not None or inputs.sink_logit is not None:
        return False
    if choose_kernel(_in_compute_dtype(inputs), Request(impl=impl, needs_lse=True)).name not in _KERNELS:
        return False
    longest = torch.stack(
        [torch.linalg.vector_norm(x, dim=-1, dtype=torch.float32).max() for x in _query_and_key(inputs)]
    )
    return float(longest.prod()) * abs(inputs.scale) <= _LARGEST and is_clean(inputs, *_query_and_key(inputs))


@torch.no_grad()
def statistics_from_products(inputs: AttentionInputs, impl: str | Kernel, names: Collection[str]) -> dict[str, Tensor]:
    """Compute entropy and column sums from products. Call it only if `can_use_products` is True.

    Args:
        inputs, impl: inputs and kernel of the matrix.
        names: the requested statistics, from `NAMES`.

    Returns:
        "entropy", in nats, ``[batch, heads, q_len]``, 0 for an empty row; "received", ``[batch, heads, kv_len]``, which
        is missing if the mask cannot be transposed.

    Cost: one product, and one more for "received", with a copy of the keys for each head.
    """
    wide, results = _in_compute_dtype(inputs), {}
    exchanged = _transposed(inputs.rule) if "received" in names else None
    if "entropy" in names:
        attended_keys, lse = attend_with_lse(wide, wide.key, Request(impl=impl))
        entropy = lse - inputs.scale * (wide.query * attended_keys).sum(-1)
        results["entropy"] = entropy.masked_fill(lse == -math.inf, 0.0).clamp_min(0.0)
    elif exchanged is not None:
        lse = attend_with_lse(wide, wide.key.new_zeros(*wide.key.shape[:3], 1), Request(impl=impl))[1]
    if exchanged is not None:
        results["received"] = _column_sums(wide, exchanged, lse, impl)
    return results


def _column_sums(inputs: AttentionInputs, rule: Mask, lse: Tensor, impl: str | Kernel) -> Tensor:
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


def _in_compute_dtype(inputs: AttentionInputs) -> AttentionInputs:
    """Return the inputs in float32 or wider, because all statistics are computed in this precision."""
    return inputs.replaced(
        query=inputs.query.to(inputs.compute_dtype), key=inputs.key.to(inputs.compute_dtype), dtype=inputs.compute_dtype
    )


def _query_and_key(inputs: AttentionInputs) -> tuple[Tensor, Tensor]:
    return inputs.query, inputs.key


def _transposed(rule: Mask) -> Mask | None:
    from saccade.masks.transposition import transposed  # noqa: PLC0415  imports masks that a product does not need

    return transposed(rule)
