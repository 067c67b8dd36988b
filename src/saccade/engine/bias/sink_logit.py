"""The sink logit: a learned term in the denominator of the softmax, attention that goes to no key."""

from __future__ import annotations

import math

import torch
from torch import Tensor


def with_sink(out: Tensor, lse: Tensor, sink_logit: Tensor) -> tuple[Tensor, Tensor]:
    """Return the output and the lse after adding a sink logit to each row's denominator.

    Args:
        out: ``[batch, heads, q_len, value_dim]``.
        lse: ``[batch, heads, q_len]``, without the sink.
        sink_logit: ``[heads]``, in the dtype of the lse.

    Returns:
        out and lse, the sink included. A row that may attend to nothing stays 0 and -inf.
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
    """Return the peak bytes that `with_sink` holds beside its inputs, results included.

    Args:
        rows: over batch and heads.
        value_dim: of the output.
        wide: dtype of the lse.
    """
    # Two tensors of the output's size in the lse's dtype, one bool per entry, and three tensors like the lse.
    return (3 * rows + 2 * rows * value_dim) * wide.itemsize + rows * value_dim


def log_share(lse: Tensor, sink_logit: Tensor) -> Tensor:
    """Return the log of the share that a sink logit leaves to the keys, in the shape of the lse; 0 without one."""
    share = torch.nn.functional.logsigmoid(lse - sink_logit[None, :, None])
    return share.masked_fill(lse == -math.inf, 0.0)
