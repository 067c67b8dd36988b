"""Entropy: over how many keys a query spreads its attention."""

from __future__ import annotations

import dataclasses

from torch import Tensor

from saccade.statistics.fused_sweep import Quantity
from saccade.statistics.per_row import PerRow, Placing
from saccade.statistics.row_block import Block

__all__ = ["Entropy"]


@dataclasses.dataclass(frozen=True)
class Entropy(PerRow):
    r"""Shannon entropy of each row, ``[batch, heads, q_len]``, in nats.

    .. math:: H_i = -\sum_j A_{ij} \log A_{ij}, \qquad 0 \le H_i \le \log |V(i)|

    with V(i) the keys that query i may attend to: 0 when one key takes everything, ``log(n)`` when n keys share
    evenly. ``H.exp()`` is therefore the effective number of keys. A row that may attend to nothing has no
    distribution; its entropy is 0, so that sums over queries need no special case. A NaN row gives NaN.

    Cost: one multiplication and one addition per weight; O(q_len) memory.

    Raises:
        UnsupportedError: asked of a matrix whose rows are not distributions.

    Example:
        >>> from saccade import AttentionMatrix
        >>> x = torch.zeros(1, 1, 8, 4)
        >>> AttentionMatrix(x, x).compute(Entropy())[0].exp()[0, 0, :3]
        tensor([8.0000, 8.0000, 8.0000])

    Reference: Ghader and Monz 2017, arXiv:1710.03348, section 5.2.
    """

    needs_distributions = True

    def of_rows(self, block: Block, placing: Placing) -> Tensor:
        return block.entropy

    def quantity(self, placing: Placing) -> Quantity | None:
        return "entropy"
