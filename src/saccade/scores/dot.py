"""Dot: the scaled or plain dot product as a score."""

from __future__ import annotations

from torch import Tensor

from saccade.scores.base import Prepared, Score
from saccade.support.validation import check_bool


class Dot(Score):
    r"""The dot product, ``scale * q · k``: the default score.

    Args:
        scaled: whether ``scale=None`` means ``head_dim ** -0.5`` instead of 1.

    Raises:
        ValueError: the widths of query and key differ.

    Cost: none beyond the product. Exact: yes.

    Example:
        >>> import torch
        >>> from saccade import attention
        >>> x = torch.eye(2)[None, None]
        >>> attention(x, x, x, score=Dot(scaled=False))[0, 0, 0]  # softmax of (1, 0)
        tensor([0.7311, 0.2689])

    Reference: Vaswani et al. 2017, arXiv:1706.03762, section 3.2.1 (scaled); Luong et al. 2015, arXiv:1508.04025,
    equation 8 (plain).
    """

    def __init__(self, *, scaled: bool = True):
        super().__init__()
        self.scaled = check_bool("scaled", scaled)

    def default_scale(self, head_dim: int) -> float:
        return head_dim**-0.5 if self.scaled and head_dim else 1.0

    def prepare(self, query: Tensor, key: Tensor) -> Prepared:
        return Prepared(query, key)

    def extra_repr(self) -> str:
        return f"scaled={self.scaled}"
