"""The weights of a matrix as a sparse tensor: for masks that leave few of them."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Protocol

import torch
from torch import Tensor

from saccade.arguments import is_integer
from saccade.errors import type_error, value_error
from saccade.statistics.block import Block

__all__ = ["SPARSE_LIMIT", "sparse_of"]

SPARSE_LIMIT = 1 << 24
"""Most weights that `Matrix.to_sparse` writes out unless told otherwise: 16 million, 600 MB in float32."""


class Blocks(Protocol):
    """What is needed of a `saccade.Matrix`."""

    @property
    def shape(self) -> tuple[int, int, int, int]:
        """(batch, heads, q_len, kv_len)."""
        ...

    @property
    def dtype(self) -> torch.dtype:
        """Of the products."""
        ...

    @property
    def device(self) -> torch.device:
        """Where the ingredients are."""
        ...

    def blocks(self) -> Iterator[Block]:
        """Complete rows."""
        ...


def sparse_of(matrix: Blocks, limit: int) -> Tensor:
    """See `saccade.Matrix.to_sparse`. Indices ascend, so that the tensor is coalesced as it is."""
    if not is_integer(limit):
        raise type_error("Matrix.to_sparse", "limit", "be an int", type(limit).__name__)
    dtype = torch.float64 if matrix.dtype == torch.float64 else torch.float32
    indices = [torch.zeros(4, 0, dtype=torch.int64, device=matrix.device)]
    values = [torch.zeros(0, dtype=dtype, device=matrix.device)]
    count = 0
    with torch.no_grad():
        for block in matrix.blocks():
            found = block.weights.nonzero(as_tuple=True)
            count += len(found[0])
            if count > limit:
                hint = "A[b, h, i] gives a row, A.topk(k) the strongest keys; to_sparse(limit=...) insists"
                raise value_error("Matrix.to_sparse", "size", f"be at most {limit:,} weights", "more", hint=hint)
            item, head, row, column = found
            own = torch.tensor([block.batch.start, block.heads.start], device=matrix.device)
            rows = row * block.rows.step + block.rows.start
            indices.append(torch.stack([item + own[0], head + own[1], rows, block.keys[column]]))
            values.append(block.weights[found].to(dtype))
    together = torch.sparse_coo_tensor(torch.cat(indices, 1), torch.cat(values), matrix.shape, check_invariants=False)
    return together.coalesce()
