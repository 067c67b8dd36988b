"""T5: a bias with a trainable scalar for each bucket of distances."""

from __future__ import annotations

import bisect
import math

import torch
from torch import Tensor, nn

from saccade.positions.bias import Bias, check_distances
from saccade.support.errors import value_error
from saccade.support.validation import check_bool, check_int


class T5(Bias):
    r"""The T5 bias: a trainable scalar for each head and *bucket* of distances, with wider buckets farther away.

    Of the n buckets on each side, the first :math:`n/2` contain one distance each. The other buckets grow by a constant
    factor up to ``max_distance``, and the last bucket contains all larger distances:

    .. math:: \mathrm{bucket}(d) = \begin{cases} d & d < n/2 \\
              \min\left(n - 1,\; \frac{n}{2} + \left\lfloor \frac{n}{2}\,
              \frac{\ln(2d/n)}{\ln(2 \cdot \mathrm{max\_distance} / n)} \right\rfloor\right) & \text{else} \end{cases}

    If ``bidirectional``, half of the buckets are for keys at or before the query and the other half for keys after it.
    Otherwise, all buckets are for keys at or before the query, and later keys fall into bucket 0. The T5 model itself
    shares one table among the layers of a stack and does not scale dot products (``scale=1.0``). All scalars start at
    0.

    Args:
        num_heads: number of query heads.
        num_buckets: total number of buckets on both sides.
        max_distance: upper limit of the distances that the buckets distinguish.
        bidirectional: whether keys after the query have separate buckets: True in an encoder, False in a decoder.

    Attributes:
        weight: ``[num_buckets, num_heads]``, like ``relative_attention_bias`` in transformers.
        reach: the first distance in the last bucket.

    Raises:
        ValueError: there are fewer than two buckets per side or an odd number for two sides, or ``max_distance`` falls
            within the buckets for single distances.
        TypeError: ``bidirectional`` is neither True nor False.

    Cost: ``num_buckets * num_heads`` parameters.

    Example:
        >>> bias = T5(1, num_buckets=8, max_distance=16)
        >>> _ = bias.weight.data.copy_(torch.arange(8.0)[:, None])
        >>> bias.table(torch.arange(-6, 7)).int().tolist()
        [[7, 6, 6, 6, 6, 5, 0, 1, 2, 2, 2, 2, 3]]

    Reference: Raffel et al. 2020, arXiv:1910.10683, section 2.1.
    """

    reach: int

    def __init__(self, num_heads: int, num_buckets: int = 32, max_distance: int = 128, bidirectional: bool = True):
        super().__init__()
        self.num_heads = check_int("num_heads", num_heads)
        self.bidirectional = check_bool("bidirectional", bidirectional)
        self.num_buckets = check_int("num_buckets", num_buckets, 4 if bidirectional else 2)
        if bidirectional and num_buckets % 2:
            raise value_error("num_buckets", "be even if bidirectional", num_buckets)
        self._per_side = num_buckets // 2 if bidirectional else num_buckets
        self._single = self._per_side // 2
        self.max_distance = check_int("max_distance", max_distance, self._single + 1)
        self.reach = bisect.bisect_left(
            range(max_distance), self._per_side - 1, key=lambda d: int(self._bucket_of(torch.tensor(d, device="cpu")))
        )
        self.weight = nn.Parameter(torch.zeros(num_buckets, num_heads))

    def table(self, distances: Tensor) -> Tensor:
        check_distances(distances)
        if self.bidirectional:
            buckets = self._bucket_of(distances.abs()) + (distances < 0) * self._per_side
        else:
            buckets = self._bucket_of(distances.clamp(min=0))
        return self.weight[buckets].T

    def extra_repr(self) -> str:
        return (
            f"{self.num_heads}, num_buckets={self.num_buckets}, max_distance={self.max_distance}, "
            f"bidirectional={self.bidirectional}"
        )

    def _bucket_of(self, distance: Tensor) -> Tensor:
        """Return the T5 bucket of a nonnegative distance, counted within one side."""
        # Use float32 and this order of operations for every dtype, so that buckets have the same bounds as in training.
        far = torch.log(distance.clamp(min=1).float() / self._single) / math.log(self.max_distance / self._single)
        wide = self._single + (far * (self._per_side - self._single)).to(torch.int64)
        return torch.where(distance < self._single, distance, wide.clamp(max=self._per_side - 1))
