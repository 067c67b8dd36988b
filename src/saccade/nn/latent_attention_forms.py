"""The two forms of latent attention: keys and values expanded from latents, or queries that absorb the expansion."""

from __future__ import annotations

from typing import Literal, NamedTuple

import torch
from torch import Tensor, nn

from saccade.matrix import Matrix
from saccade.mechanisms import Mechanism
from saccade.positions.token_positions import GivenPositions

Form = Literal["auto", "expanded", "absorbed"]
FORMS: tuple[Form, ...] = ("auto", "expanded", "absorbed")


class LatentSizes(NamedTuple):
    """The sizes of latent attention, and the costs of its two forms.

    Args:
        heads: number of heads.
        latent: width of a token's latent.
        head: width of queries and keys of one head, including the rotated part.
        rotated: width of the rotated part, which all heads share.
        value: width of values of one head.
    """

    heads: int
    latent: int
    head: int
    rotated: int
    value: int

    @property
    def plain(self) -> int:
        """Return the width of queries and keys without the rotated part."""
        return self.head - self.rotated

    @property
    def cached(self) -> int:
        """Return how many numbers the cache holds per token."""
        return self.latent + self.rotated

    @property
    def cached_expanded(self) -> int:
        """Return how many numbers a cache of keys and values of all heads would hold per token."""
        return self.heads * (self.head + self.value)

    @property
    def crossover(self) -> float:
        """Return the number of queries from which the expanded form is cheaper, for many keys."""
        more = 2 * self.latent + self.rotated - self.head - self.value
        return self.latent * (self.plain + self.value) / more if more > 0 else float("inf")

    def cost(self, form: Form, q_len: int, kv_len: int) -> int:
        """Return the multiplications of one head in a form of latent attention, if every pair is visible."""
        weights = self.latent * (self.plain + self.value)
        if form == "expanded":
            return kv_len * weights + q_len * kv_len * (self.head + self.value)
        return q_len * weights + q_len * kv_len * (self.cached + self.latent)

    def cheaper(self, q_len: int, kv_len: int) -> Form:
        """Return the form of latent attention with fewer multiplications."""
        costs = {form: self.cost(form, q_len, kv_len) for form in FORMS[1:]}
        return min(costs, key=costs.__getitem__)  # expanded if equal


class Expanded(NamedTuple):
    """An attention matrix, and the values of all heads, which were expanded from the latents along with the keys."""

    matrix: Matrix
    values: Tensor

    def matmul(self, latents: Tensor, *, dropout_p: float = 0.0) -> Tensor:
        """Return ``A @ values``; the latents, which a cache passes as values, are not needed."""
        del latents
        return self.matrix.matmul(self.values, dropout_p=dropout_p)


class Expanding(nn.Module):
    """A mechanism for caches of latents, which expands keys and values of all heads from them.

    It is a module so that the cache can check which parameters require a gradient.

    Args:
        mechanism: the layer's mechanism.
        expansion: linear layer from latents to keys and values, ``[latent, heads * (plain + value)]``.
        sizes: the layer's sizes.
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
        """Return the matrix of ``query [batch, heads, q_len, head]`` and latents ``key [batch, 1, kv_len, cached]``."""
        sizes = self.sizes
        latents, rotated = key[:, 0].split([sizes.latent, sizes.rotated], -1)
        both = self.expansion(latents).unflatten(-1, (sizes.heads, -1)).transpose(1, 2)
        plain, values = both.split([sizes.plain, sizes.value], -1)
        shared = rotated[:, None].expand(-1, sizes.heads, -1, -1).to(plain.dtype)
        keys = torch.cat([plain, shared], -1)
        matrix = self.mechanism(query, keys, mask=mask, q_positions=q_positions, kv_positions=kv_positions)
        return Expanded(matrix, values)


def absorb(query: Tensor, weight: Tensor, sizes: LatentSizes) -> Tensor:
    """Return transformed queries whose scores with latents equal those of ``query`` with the expanded keys.

    Args:
        query: ``[batch, heads, q_len, head]``.
        weight: weight of the expansion, ``[heads * (plain + value), latent]``.
        sizes: the layer's sizes.

    Returns:
        ``[batch, heads, q_len, cached]``.
    """
    key_weight = weight.unflatten(0, (sizes.heads, -1))[:, : sizes.plain]
    plain, rotated = query.split([sizes.plain, sizes.rotated], -1)
    return torch.cat([torch.einsum("bhqd,hdc->bhqc", plain, key_weight), rotated], -1)


def values_of_latents(attended: Tensor, weight: Tensor, sizes: LatentSizes) -> Tensor:
    """Return averages of values, ``[batch, heads, q_len, value]``, from averages of latents, ``[..., latent]``."""
    value_weight = weight.unflatten(0, (sizes.heads, -1))[:, sizes.plain :]
    return torch.einsum("bhqc,hvc->bhqv", attended, value_weight)
