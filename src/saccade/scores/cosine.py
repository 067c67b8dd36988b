"""Cosine: a score that depends on the angle between query and key."""

from __future__ import annotations

from torch import Tensor
from torch.nn import functional as F

from saccade.scores.base import Prepared, Score, widened


class Cosine(Score):
    r"""The cosine of the angle between query and key, :math:`q \cdot k / (|q|\,|k|)`, between -1 and 1.

    The cosine of a zero vector with any vector is 0. Since the scores are small, a ``scale`` of about 10 (an inverse
    temperature) is common; ``scale=None`` means 1.

    Cost: one pass over queries and keys before attention.

    Example:
        >>> import torch
        >>> from saccade import AttentionMatrix
        >>> query, key = torch.tensor([[[[1.0, 0.0]]]]), torch.tensor([[[[5.0, 0.0], [0.0, 5.0]]]])
        >>> AttentionMatrix(query, key, score=Cosine())[0, 0, 0]  # softmax of (1, 0)
        tensor([0.7311, 0.2689])

    Reference: Graves et al. 2014, arXiv:1410.5401, equation 6; Liu et al. 2022, arXiv:2111.09883, section 3.2.
    """

    def prepare(self, query: Tensor, key: Tensor) -> Prepared:
        query, key = widened(query), widened(key)
        return Prepared(F.normalize(query, dim=-1), F.normalize(key, dim=-1))
