"""Bilinear: a dot product after a learned linear map of the queries."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from saccade.scores.base import Prepared, Score, widened
from saccade.support.validation import check_int


class Bilinear(Score):
    r"""The bilinear score with a learned matrix, :math:`q^\top W k` ("general", "multiplicative").

    Queries are mapped to ``q W`` once. A plain dot product follows, on the fastest kernel.

    Args:
        query_dim: width of queries.
        key_dim: width of keys; may differ from ``query_dim``.

    Attributes:
        weight: ``[query_dim, key_dim]``, shared by all heads and initialised Xavier-uniform.

    Raises:
        ValueError: a size is below 1, or the width of query or key is wrong.

    Cost: one matrix product before attention, O(q_len · query_dim · key_dim).

    Example:
        >>> import torch
        >>> from saccade import attention
        >>> query, key = torch.ones(1, 1, 2, 4), torch.ones(1, 1, 3, 6)
        >>> attention(query, key, key, score=Bilinear(4, 6)).shape
        torch.Size([1, 1, 2, 6])

    Reference: Luong et al. 2015, arXiv:1508.04025, equation 8.
    """

    def __init__(self, query_dim: int, key_dim: int):
        super().__init__()
        sizes = check_int("query_dim", query_dim), check_int("key_dim", key_dim)
        self.weight = nn.Parameter(torch.empty(sizes))
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Initialise the bilinear weight from a Xavier-uniform distribution."""
        nn.init.xavier_uniform_(self.weight)

    @property
    def widths(self) -> tuple[int, int]:
        query_dim, key_dim = self.weight.shape
        return query_dim, key_dim

    def prepare(self, query: Tensor, key: Tensor) -> Prepared:
        query = widened(query)
        return Prepared(query @ self.weight.to(query.dtype), widened(key))

    def extra_repr(self) -> str:
        return "query_dim={}, key_dim={}".format(*self.widths)
