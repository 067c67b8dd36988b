"""The two ways to read latents: expanded to keys and values of every head, or absorbed into the queries."""

from __future__ import annotations

from typing import Literal, NamedTuple

import torch
from torch import Tensor, nn

from saccade.matrix import Matrix
from saccade.mechanisms import Mechanism
from saccade.positions.token_positions import GivenPositions

__all__ = ["FORMS", "Expanded", "Expanding", "Form", "LatentSizes", "absorbed", "released"]

Form = Literal["auto", "expanded", "absorbed"]
FORMS: tuple[Form, ...] = ("auto", "expanded", "absorbed")


class LatentSizes(NamedTuple):
    """The widths of latent attention, and what its forms cost.

    Args:
        heads: how many.
        latent: of what a token is remembered by.
        head: of queries and keys of one head, the turned part included.
        turned: of that part, which all heads share.
        value: of values of one head.
    """

    heads: int
    latent: int
    head: int
    turned: int
    value: int

    @property
    def plain(self) -> int:
        """The part of a head's queries and keys that is not turned."""
        return self.head - self.turned

    @property
    def held(self) -> int:
        """Numbers that a token is remembered by."""
        return self.latent + self.turned

    @property
    def held_expanded(self) -> int:
        """Numbers that keys and values of all heads would take."""
        return self.heads * (self.head + self.value)

    @property
    def crossover(self) -> float:
        """Queries from which on the expanded form is the cheaper one, where keys are many."""
        more = 2 * self.latent + self.turned - self.head - self.value
        return self.latent * (self.plain + self.value) / more if more > 0 else float("inf")

    def cost(self, form: Form, q_len: int, kv_len: int) -> int:
        """Multiplications of one head; every query is counted as if it saw every key."""
        weights = self.latent * (self.plain + self.value)
        if form == "expanded":
            return kv_len * weights + q_len * kv_len * (self.head + self.value)
        return q_len * weights + q_len * kv_len * (self.held + self.latent)

    def cheaper(self, q_len: int, kv_len: int) -> Form:
        """The form that takes fewer multiplications."""
        costs = {form: self.cost(form, q_len, kv_len) for form in FORMS[1:]}
        return min(costs, key=costs.__getitem__)  # expanded where they cost the same


class Expanded(NamedTuple):
    """A matrix, and the values of all heads, which were made of the latents along with the keys."""

    matrix: Matrix
    values: Tensor

    def matmul(self, latents: Tensor, *, dropout_p: float = 0.0) -> Tensor:
        """``A @ values``; the latents, which a cache hands over in their place, are in them."""
        del latents
        return self.matrix.matmul(self.values, dropout_p=dropout_p)


class Expanding(nn.Module):
    """Stands where a cache wants a mechanism: makes keys and values of all heads of the latents it is handed.

    A module, so that the cache sees which parameters want a gradient.

    Args:
        mechanism: of the layer.
        expansion: from latents to keys and values, ``[latent, heads * (plain + value)]``.
        sizes: of the layer.
    """

    def __init__(self, mechanism: Mechanism, expansion: nn.Module, sizes: LatentSizes):
        super().__init__()
        self.mechanism, self.expansion, self.sizes = mechanism, expansion, sizes

    def forward(
        self,
        query: Tensor,
        key: Tensor,
        *,
        mask: object = None,
        q_positions: GivenPositions = None,
        kv_positions: GivenPositions = None,
    ) -> Expanded:
        """The matrix of ``query [batch, heads, q_len, head]`` and latents ``key [batch, 1, kv_len, held]``."""
        sizes = self.sizes
        latents, turned = key[:, 0].split([sizes.latent, sizes.turned], -1)
        both = self.expansion(latents).unflatten(-1, (sizes.heads, -1)).transpose(1, 2)
        plain, values = both.split([sizes.plain, sizes.value], -1)
        shared = turned[:, None].expand(-1, sizes.heads, -1, -1).to(plain.dtype)
        keys = torch.cat([plain, shared], -1)
        matrix = self.mechanism(query, keys, mask=mask, q_positions=q_positions, kv_positions=kv_positions)
        return Expanded(matrix, values)


def absorbed(query: Tensor, weight: Tensor, sizes: LatentSizes) -> Tensor:
    """Queries that compare themselves with latents as ``query`` does with the keys of its head.

    Args:
        query: ``[batch, heads, q_len, head]``.
        weight: of the expansion, ``[heads * (plain + value), latent]``.
        sizes: of the layer.

    Returns:
        ``[batch, heads, q_len, held]``.
    """
    of_keys = weight.unflatten(0, (sizes.heads, -1))[:, : sizes.plain]
    plain, turned = query.split([sizes.plain, sizes.turned], -1)
    return torch.cat([torch.einsum("bhqd,hdc->bhqc", plain, of_keys), turned], -1)


def released(attended: Tensor, weight: Tensor, sizes: LatentSizes) -> Tensor:
    """Values of heads, ``[batch, heads, q_len, value]``, of averages of latents, ``[batch, heads, q_len, latent]``."""
    of_values = weight.unflatten(0, (sizes.heads, -1))[:, sizes.plain :]
    return torch.einsum("bhqc,hvc->bhqv", attended, of_values)
