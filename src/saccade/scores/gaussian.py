"""Gaussian: a score that depends on the distance between query and key."""

from __future__ import annotations

import math

import torch
from torch import Tensor, nn

from saccade.scores.base import Prepared, Score, widened
from saccade.support.validation import check_bool, check_number


class Gaussian(Score):
    r"""The Gaussian score, :math:`-|q - k|^2 / (2\sigma^2)`: after softmax, a normalised Gaussian kernel.

    The squared distance is computed as a dot product of vectors extended by their squared norms:
    :math:`-|q-k|^2/2 = q \cdot k - |k|^2/2 - |q|^2/2`. Omitting the key's norm, as is often done, changes the weights.
    In float32, the difference of large terms loses precision if :math:`|q|^2/\sigma^2` is in the thousands. In that
    case, shift queries and keys by a common vector first; distances stay the same.

    Args:
        bandwidth: σ, above 0, in units of the queries.
        trainable: whether σ is trained; the parameter is its logarithm.

    Raises:
        ValueError: the bandwidth is not a number above 0, or the widths of query and key differ.

    Cost: two more columns in query and key.

    Example:
        >>> import torch
        >>> from saccade import AttentionMatrix
        >>> query, key = torch.tensor([[[[1.0]]]]), torch.tensor([[[[1.0], [3.0]]]])
        >>> AttentionMatrix(query, key, score=Gaussian())[0, 0, 0]  # softmax of (0, -2)
        tensor([0.8808, 0.1192])

    Reference: Buades et al. 2005, "A non-local algorithm for image denoising"; Tsai et al. 2019, arXiv:1908.11775,
    section 3.
    """

    log_bandwidth: Tensor

    def __init__(self, bandwidth: float = 1.0, *, trainable: bool = False):
        super().__init__()
        start = torch.tensor(math.log(check_number("bandwidth", bandwidth, above=0)))
        if check_bool("trainable", trainable):
            self.log_bandwidth = nn.Parameter(start)
        else:
            self.register_buffer("log_bandwidth", start)

    def prepare(self, query: Tensor, key: Tensor) -> Prepared:
        query, key = widened(query), widened(key)
        factor = torch.exp(-self.log_bandwidth.to(query.dtype))
        query, key = query * factor, key * factor
        one_q, one_k = query.new_ones(*query.shape[:-1], 1), key.new_ones(*key.shape[:-1], 1)
        norm_q, norm_k = (-0.5 * x.square().sum(-1, keepdim=True) for x in (query, key))
        return Prepared(torch.cat([query, one_q, norm_q], -1), torch.cat([key, norm_k, one_k], -1))

    def extra_repr(self) -> str:
        return f"bandwidth={self.log_bandwidth.detach().exp().item():.4g}"
