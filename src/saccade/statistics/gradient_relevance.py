"""Relevance and gradient rollout: input tokens' contributions, from attention times its gradient in each layer."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence

import torch
from torch import Tensor

from saccade.statistics.gradient_products import product_blocks
from saccade.statistics.row_block import Block, as_slice
from saccade.statistics.statistic import MatrixInfo, MatrixLike
from saccade.support.errors import unsupported, value_error
from saccade.support.torch_modes import without_autocast
from saccade.support.validation import check_int, check_number

_Blocks = Callable[[], Iterator[Block]]


def relevance(matrices: Sequence[MatrixLike], gradients: Sequence[MatrixLike], queries: Sequence[int]) -> Tensor:
    r"""Compute the relevance of input tokens to queries of the last layer, ``[batch, len(queries), kv_len]``.

    .. math:: \bar A_l = \tfrac1H \textstyle\sum_h (A_{l,h} \odot \partial L / \partial A_{l,h})^+, \qquad
              R \leftarrow R + \bar A_l R \quad \text{from the first layer to the last, } R = I \text{ before it}

    The gradient restricts relevance to one output, such as a class score or a token's logit: attention that does not
    raise this output has no relevance. The result consists of rows of R, computed from the last layer down to
    the first without forming R or any :math:`\bar A_l`. The entry for a query's own token includes the 1 of the
    residual stream.

    Args:
        matrices: one matrix per layer, in order; all are square and have the same number of tokens.
        gradients: the gradient with respect to each matrix, such as a `saccade.matrix.GradientMatrix`, in the same
            order and with the same shape.
        queries: indices of queries in the last layer: a classifier's class token, or the position that makes the
            prediction.

    Raises:
        TypeError, ValueError: there are no layers, layers or gradients have different shapes, or an index is out of
            range.
        UnsupportedError: the matrices contain scores instead of weights.

    Cost: one pass over the visible pairs of each layer and their gradients; O(batch · len · len(queries)) memory.

    Example:
        >>> from saccade import AttentionMatrix, masks
        >>> from saccade.matrix import GradientMatrix
        >>> x = torch.zeros(1, 2, 3, 4)
        >>> A, gradient = AttentionMatrix(x, x, masks.Causal()), GradientMatrix(x + 1, x + 1)
        >>> relevance([A], [gradient], [1])
        tensor([[[2., 3., 0.]]])

    Reference: Chefer et al. 2021, arXiv:2103.15679, equations 5 and 6.
    """
    layers, rows = _checked(matrices, gradients, queries)
    with torch.no_grad(), without_autocast(rows.device):
        for blocks, heads in reversed(layers):
            rows += _transposed_mean(blocks(), rows, heads)
    return rows.mT.contiguous()


def gradient_rollout(
    matrices: Sequence[MatrixLike],
    gradients: Sequence[MatrixLike],
    queries: Sequence[int],
    *,
    residual: float = 0.5,
) -> Tensor:
    r"""Compute gradient-weighted rollout: each token's share in the queries, ``[batch, len(queries), kv_len]``.

    .. math:: r \leftarrow \rho\, r + (1 - \rho)\, (N_l \bar A_l)^\top r, \qquad
              \bar A_l = \tfrac1H \textstyle\sum_h (A_{l,h} \odot \partial L / \partial A_{l,h})^+

    from the last layer down to the first, where :math:`N_l` scales each row to sum to 1. This is `rollout`, restricted
    to attention that raises the loss L. It does not depend on the scale of the gradients, so layers with small
    gradients count as much as other layers. A row without a positive entry passes on only the residual stream. The
    shares of each query sum to 1.

    Args:
        matrices, gradients, queries: see `relevance`.
        residual: share of the residual stream, from 0 to 1.

    Raises:
        TypeError, ValueError: see `relevance`, or ``residual`` is out of range.
        UnsupportedError: the matrices contain scores instead of weights.

    Cost: two passes over the visible pairs of each layer and their gradients; O(batch · len · len(queries)) memory.

    Example:
        >>> from saccade import AttentionMatrix, masks
        >>> from saccade.matrix import GradientMatrix
        >>> x = torch.zeros(1, 2, 3, 4)
        >>> A, gradient = AttentionMatrix(x, x, masks.Causal()), GradientMatrix(x + 1, x + 1)
        >>> gradient_rollout([A], [gradient], [1])
        tensor([[[0.2500, 0.7500, 0.0000]]])

    Reference: Abnar and Zuidema 2020, arXiv:2005.00928, section 3; Chefer et al. 2021, arXiv:2103.15679.
    """
    if not 0.0 <= check_number("residual", residual) <= 1.0:
        raise value_error("residual", "be from 0 to 1", residual)
    layers, rows = _checked(matrices, gradients, queries)
    with torch.no_grad(), without_autocast(rows.device):
        for blocks, heads in reversed(layers):
            sums = _row_sums(blocks(), rows) / heads
            scaled = torch.where(sums > 0, rows / sums.where(sums > 0, 1.0), 0.0)
            stays = torch.where(sums > 0, 0.0, rows)
            rows = residual * rows + (1.0 - residual) * (_transposed_mean(blocks(), scaled, heads) + stays)
    return rows.mT.contiguous()


def _checked(
    matrices: Iterable[MatrixLike], gradients: Iterable[MatrixLike], queries: Iterable[int]
) -> tuple[list[tuple[_Blocks, int]], Tensor]:
    """Check the arguments of a relevance map, and return the layers and the initial rows.

    Each layer is a pair: a function that yields blocks of attention times gradient, and the number of heads. The
    initial rows are the queries' rows of the identity matrix, ``[batch, len, len(queries)]`` in float32 or wider.
    """
    pairs = [[*matrices], [*gradients]]
    if not pairs[0]:
        raise value_error("matrices", "contain one for each layer", "none")
    if len(pairs[0]) != len(pairs[1]):
        raise value_error("gradients", f"be one for each of {len(pairs[0])} matrices", len(pairs[1]))
    batch, _, length, _ = pairs[0][0].shape
    for index, (matrix, gradient) in enumerate(zip(*pairs, strict=True)):
        if (matrix.shape[0], *matrix.shape[2:]) != (batch, length, length):
            rule = f"all be [{batch}, heads, {length}, {length}], like the first"
            raise value_error("matrices", rule, f"{list(matrix.shape)} at layer {index}")
        if gradient.shape != matrix.shape:
            rule = f"be {list(matrix.shape)} at layer {index}, like the matrix"
            raise value_error("gradients", rule, list(gradient.shape))
        if matrix.hidden:
            reason = f"layer {index} contains scores, where masked pairs are {matrix.hidden} and not 0"
            raise unsupported("a product with gradients", [reason], hint="pass the attention matrix itself")
    chosen = [check_int("each of queries", query, -length, below=length) for query in queries]
    info = MatrixInfo.of(pairs[0][0])
    rows = torch.zeros(batch, length, len(chosen), dtype=info.dtype, device=info.device)
    for index, query in enumerate(chosen):
        rows[:, query, index] = 1.0
    return [(_blocks(*pair), pair[0].shape[1]) for pair in zip(*pairs, strict=True)], rows


def _blocks(matrix: MatrixLike, gradient: MatrixLike) -> _Blocks:
    return lambda: product_blocks(matrix, gradient, keep_positive=True)


def _transposed_mean(blocks: Iterator[Block], rows: Tensor, heads: int) -> Tensor:
    """Average the heads, transpose, and multiply by ``rows [batch, q_len, width]``: ``[batch, kv_len, width]``."""
    out = torch.zeros_like(rows)
    for block in blocks:
        block_rows = rows[block.batch, as_slice(block.rows)][:, None].to(block.weights.dtype)
        part = (block.weights.mT @ block_rows).sum(1) / heads
        for span, sums in block.by_range(part.mT):
            out[block.batch, as_slice(span)] += sums.mT
    return out


def _row_sums(blocks: Iterator[Block], like: Tensor) -> Tensor:
    """Return the sum of each row over keys and heads, ``[batch, q_len, 1]``."""
    sums = like.new_zeros(*like.shape[:2], 1)
    for block in blocks:
        sums[block.batch, as_slice(block.rows)] += block.weights.sum(-1).sum(1)[..., None]
    return sums
