"""Concentration of attention: entropy, largest weight, sum of squares, and number of keys that cover a share."""

from __future__ import annotations

import dataclasses

import numpy as np
import torch
from torch import Tensor

from saccade.positions.token_positions import Positions
from saccade.statistics.per_row import PerRow
from saccade.statistics.row_block import Block
from saccade.statistics.statistic import MatrixInfo, Quantity
from saccade.support.errors import value_error
from saccade.support.validation import check_number, check_type


@dataclasses.dataclass(frozen=True)
class Entropy(PerRow):
    r"""Shannon entropy of each row, ``[batch, heads, q_len]``, in nats.

    .. math:: H_i = -\sum_j A_{ij} \log A_{ij}, \qquad 0 \le H_i \le \log |V(i)|

    where V(i) is the set of keys that query i may attend to. Entropy is 0 if one key gets all attention, and ``log(n)``
    if n keys share it evenly, so ``H.exp()`` is the effective number of keys. A row that may attend to nothing has no
    distribution; its entropy is 0, so that sums over queries need no special case. A NaN row gives NaN.

    Cost: one multiplication and one addition per weight; O(q_len) memory.

    Raises:
        UnsupportedError: the rows of the matrix are not distributions.

    Example:
        >>> from saccade import AttentionMatrix
        >>> x = torch.zeros(1, 1, 8, 4)
        >>> AttentionMatrix(x, x).compute(Entropy())[0].exp()[0, 0, :3]
        tensor([8.0000, 8.0000, 8.0000])

    Reference: Ghader and Monz 2017, arXiv:1710.03348, section 5.2.
    """

    needs_distributions = True

    def of_rows(self, block: Block, q: Positions, kv: Positions) -> Tensor:
        return block.entropy

    def quantity(self, q: Positions, kv: Positions) -> Quantity | None:
        return "entropy"


@dataclasses.dataclass(frozen=True)
class LargestWeight(PerRow):
    """The largest weight of each row, ``[batch, heads, q_len]``; 0 if a row attends to nothing.

    For uniform attention, it is 1 / (number of visible keys).

    Cost: one comparison per weight; O(q_len) memory.
    """

    def of_rows(self, block: Block, q: Positions, kv: Positions) -> Tensor:
        return block.largest

    def quantity(self, q: Positions, kv: Positions) -> Quantity | None:
        return "largest_weight"


@dataclasses.dataclass(frozen=True)
class SquaredNorm(PerRow):
    r"""Sum of the squares of each row, ``[batch, heads, q_len]``.

    .. math:: \sum_j A_{ij}^2, \qquad \|A\|_F^2 = \sum_i \sum_j A_{ij}^2

    Its inverse is also an effective number of keys (of order 2, whereas ``entropy.exp()`` has order 1): 1 if one key
    gets all attention, n if n keys share it evenly. Its sum over the queries is the square of the Frobenius norm.

    Cost: one multiplication and one addition per weight; O(q_len) memory.

    Example:
        >>> from saccade import AttentionMatrix
        >>> x = torch.zeros(1, 1, 4, 4)
        >>> AttentionMatrix(x, x).compute(SquaredNorm())[0].sum(-1).sqrt()
        tensor([[1.]])
    """

    def of_rows(self, block: Block, q: Positions, kv: Positions) -> Tensor:
        return torch.linalg.vector_norm(block.weights, dim=-1).square_()

    def quantity(self, q: Positions, kv: Positions) -> Quantity | None:
        return "squares"


@dataclasses.dataclass(frozen=True)
class Coverage(PerRow):
    """Number of keys that cover a share of a row's attention, int64 ``[batch, heads, q_len, len(shares)]``.

    This is the smallest number of keys with weights that add up to the given share of the row's sum, up to rounding; 0
    for a row that attends to nothing, -1 for a NaN row.

    Args:
        shares: shares of the row's attention, between 0 and 1.

    Raises:
        TypeError, ValueError: ``shares`` is not a tuple of one or more numbers between 0 and 1.
        UnsupportedError: the rows of the matrix are not distributions.

    Cost: a sort of every row, about as slow as two matrix products on CPU; O(q_len · len(shares)) memory.

    Example:
        >>> from saccade import AttentionMatrix
        >>> x = torch.zeros(1, 1, 1, 4)
        >>> AttentionMatrix(x, torch.zeros(1, 1, 100, 4)).compute(Coverage())[0].tolist()
        [[[[50, 90, 99]]]]
    """

    shares: tuple[float, ...] = (0.5, 0.9, 0.99)

    def __post_init__(self) -> None:
        if not check_type("shares", self.shares, tuple, "be a tuple of numbers"):
            raise value_error("shares", "contain at least one number", self.shares)
        for share in self.shares:
            check_number("each of shares", share, above=0.0, below=1.0)

    needs_distributions = True

    def of_nothing(self, info: MatrixInfo) -> Tensor:
        return torch.zeros(*info.shape[:3], len(self.shares), dtype=torch.int64, device=info.device)

    def of_rows(self, block: Block, q: Positions, kv: Positions) -> Tensor:
        mass = _descending(block.weights).cumsum(-1)
        total = mass[..., -1:]
        # Allow for rounding of the sums: of four keys with equal weights, two must reach one half.
        slack = 64 * torch.finfo(mass.dtype).eps
        goals = total * (torch.tensor(self.shares, dtype=mass.dtype, device=mass.device) - slack)
        counts = torch.searchsorted(mass, goals) + 1
        return torch.where(total > 0, counts.clamp_max_(mass.shape[-1]), torch.where(total == 0, 0, -1))


def _descending(weights: Tensor) -> Tensor:
    """Sort the weights of each row in descending order."""
    if weights.device.type != "cpu":
        return weights.sort(-1, descending=True).values
    # NumPy sorts with vector instructions and takes 5 ns per entry; torch takes 70 ns.
    return torch.from_numpy(np.sort(weights.numpy(), axis=-1)).flip(-1)
