"""The weights of a matrix as a sparse tensor, for masks that leave few of them."""

from __future__ import annotations

import torch
from torch import Tensor

from saccade.statistics.statistic import MatrixInfo, MatrixLike
from saccade.support.errors import value_error
from saccade.support.validation import check_int

DENSE_LIMIT = 1 << 26
"""Default limit of `Matrix.to_dense`: 64 million weights, 256 MB in float32."""

SPARSE_LIMIT = 1 << 24
"""Default limit of `Matrix.to_sparse`: 16 million weights, 600 MB in float32."""


def sparse_of(matrix: MatrixLike, limit: int) -> Tensor:
    """Implement `saccade.Matrix.to_sparse`."""
    check_int("limit", limit, None)
    dtype = MatrixInfo.of(matrix).dtype
    indices = [torch.zeros(4, 0, dtype=torch.int64, device=matrix.device)]
    values = [torch.zeros(0, dtype=dtype, device=matrix.device)]
    count = 0
    with torch.no_grad():
        for block in matrix.blocks():
            found = block.weights.nonzero(as_tuple=True)
            count += len(found[0])
            if count > limit:
                hint = "A[b, h, i] gives a row, A.topk(k) the strongest keys; to_sparse(limit=...) insists"
                raise value_error("size", f"be at most {limit:,} weights", "more", hint=hint)
            item, head, row, column = found
            own = torch.tensor([block.batch.start, block.heads.start], device=matrix.device)
            indices.append(torch.stack([item + own[0], head + own[1], block.queries[row], block.keys[column]]))
            values.append(block.weights[found].to(dtype))
    together = torch.sparse_coo_tensor(torch.cat(indices, 1), torch.cat(values), matrix.shape, check_invariants=False)
    return together.coalesce()
