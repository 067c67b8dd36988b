"""Which head tells most about a text, by statistics that can be stated."""

from collections.abc import Callable
from dataclasses import dataclass
from enum import Enum

import torch
from torch import Tensor

__all__ = ["Head", "Statistic", "position_information", "rank_heads", "unexplained_information"]


class Statistic(Enum):
    """What "most telling" means."""

    POSITION = "position"
    UNEXPLAINED = "unexplained"

    @property
    def label(self) -> str:
        """Its name."""
        return {"position": "position mutual information", "unexplained": "unexplained information"}[self.value]

    @property
    def meaning(self) -> str:
        """What it measures, in a few words."""
        return {
            "position": "how much the place of a word says about where it looks",
            "unexplained": "how far words look elsewhere than distance and everybody's favourites explain",
        }[self.value]

    @property
    def function(self) -> Callable[[Tensor], Tensor]:
        """Computes it from weights, ``[..., q_len, kv_len]`` to float64 ``[...]``."""
        return {"position": position_information, "unexplained": unexplained_information}[self.value]


@dataclass(frozen=True)
class Head:
    """A head, and how much it tells.

    Attributes:
        layer, head: counted from 0.
        information: the statistic, in nats.
    """

    layer: int
    head: int
    information: float


def position_information(weights: Tensor) -> Tensor:
    r"""Mutual information, in nats, between where a query stands and where it looks.

    .. math:: I = H\Bigl(\frac1n \sum_i a_i\Bigr) - \frac1n \sum_i H(a_i)

    0 when all rows are alike (a sink, uniform attention), at most ln n, when every query looks at a key of its
    own. Rows are scaled to sum to 1 first; a row of zeros does not count.

    Args:
        weights: ``[..., q_len, kv_len]``, not negative.

    Returns:
        float64 ``[...]``.
    """
    rows, count = _rows(weights)
    mean = rows.sum(-2) / count[..., None]
    entropy = torch.special.entr
    return (entropy(mean).sum(-1) - entropy(rows).sum((-2, -1)) / count).clamp(min=0)


def unexplained_information(weights: Tensor) -> Tensor:
    r"""Information, in nats, that neither a key's popularity nor its distance from the query explains.

    .. math:: I = s \cdot \frac1n \sum_i \mathrm{KL}(a_i \,\|\, e_i), \qquad e_{ij} \propto m_j\, o_{j-i}

    with m the mean row, o the mean weight at each distance, and s the share of the attention that the weights hold:
    0 for a sink and for a head that looks at the word before, whatever the words are.

    Args:
        weights: ``[..., q_len, kv_len]``, not negative; rows hold what is left of their attention.

    Returns:
        float64 ``[...]``.
    """
    rows, count = _rows(weights)
    q_len, kv_len = rows.shape[-2:]
    distance = torch.arange(kv_len) - torch.arange(q_len)[:, None] + q_len - 1  # [q_len, kv_len], from 0
    pairs = torch.bincount(distance.flatten())
    at_distance = rows.new_zeros(*rows.shape[:-2], len(pairs)).index_add_(-1, distance.flatten(), rows.flatten(-2))
    expected = rows.sum(-2, keepdim=True) * (at_distance / pairs)[..., distance]
    expected = expected / expected.sum(-1, keepdim=True)
    surprise = torch.where(rows > 0, rows * (rows / expected).log(), 0.0)
    share = weights.double().sum(-1).mean(-1)
    return (share * surprise.sum((-2, -1)) / count).clamp(min=0)


def rank_heads(
    weights: Tensor,
    statistic: Statistic = Statistic.UNEXPLAINED,
    *,
    layer: int | None = None,
    head: int | None = None,
) -> list[Head]:
    """Rank heads by what they tell, the most telling first; of equals the first layer, then the first head.

    Args:
        weights: ``[layers, heads, q_len, kv_len]``.
        statistic: by what to rank.
        layer: consider this layer only.
        head: consider this head of every layer only.
    """
    heads = [
        Head(own_layer, own_head, value)
        for own_layer, values in enumerate(statistic.function(weights).tolist())
        for own_head, value in enumerate(values)
        if layer in (None, own_layer) and head in (None, own_head)
    ]
    return sorted(heads, key=lambda one: -one.information)


def _rows(weights: Tensor) -> tuple[Tensor, Tensor]:
    """Rows that sum to 1 where there is anything in them, and how many these are, at least 1."""
    weights = weights.double()
    mass = weights.sum(-1, keepdim=True)
    return torch.where(mass > 0, weights / mass, 0.0), (mass[..., 0] > 0).sum(-1).clamp(min=1)
