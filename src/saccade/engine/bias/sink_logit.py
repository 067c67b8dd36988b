"""The sink logit, a trainable term in the softmax denominator that absorbs attention but belongs to no key."""

from __future__ import annotations

import math

import torch
from torch import Tensor


def with_sink(out: Tensor, lse: Tensor, sink_logit: Tensor) -> tuple[Tensor, Tensor]:
    """Add a sink logit to each row's denominator and return the resulting output and lse.

    Args:
        out: ``[batch, heads, q_len, value_dim]``.
        lse: ``[batch, heads, q_len]``, without the sink.
        sink_logit: ``[heads]``, in the dtype of the lse.

    Returns:
        The output and the lse with the sink included. For a row without visible keys, they remain 0 and -inf.
    """
    sink, empty = sink_logit[None, :, None], lse == -math.inf
    lse = lse.masked_fill(empty, 0.0)  # second derivatives at -inf are NaN
    share = torch.sigmoid(lse - sink).masked_fill(empty, 0.0)  # even if the sink is NaN or inf
    total = torch.logaddexp(lse, sink).masked_fill(empty, -math.inf)
    # A NaN row must not add 0 * NaN to the gradient of the sink that all rows share.
    spoilt = out.detach().isnan()
    clean = out.to(share.dtype).masked_fill(spoilt, 0.0) * share[..., None]
    return clean.to(out.dtype).masked_fill(spoilt, math.nan), total


def bytes_of_sink(rows: int, value_dim: int, wide: torch.dtype) -> int:
    """Return the peak memory of `with_sink` in bytes, including results but not inputs.

    Args:
        rows: number of rows, summed over batch and heads.
        value_dim: width of the output.
        wide: dtype of the lse.
    """
    # Two tensors with the output's size and the lse's dtype, one bool per entry, and three tensors shaped like the lse.
    return (3 * rows + 2 * rows * value_dim) * wide.itemsize + rows * value_dim


def log_share(lse: Tensor, sink_logit: Tensor) -> Tensor:
    """Return the log of the total weight of the keys after a sink is added, shaped like the lse; 0 for empty rows."""
    share = torch.nn.functional.logsigmoid(lse - sink_logit[None, :, None])
    return share.masked_fill(lse == -math.inf, 0.0)
