"""The two forms of latent attention: expand latents to keys and values, or absorb the expansion into the queries."""

from __future__ import annotations

from typing import Any, Literal, NamedTuple

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
        head: width of the queries and keys of one head, including the rotated part.
        rotated: width of the rotated part, which all heads share.
        value: width of the values of one head.
    """

    heads: int
    latent: int
    head: int
    rotated: int
    value: int

    @property
    def plain(self) -> int:
        """Width of one head's queries and keys, without the rotated part."""
        return self.head - self.rotated

    @property
    def cached(self) -> int:
        """Number of elements that a latent cache stores per token."""
        return self.latent + self.rotated

    @property
    def cached_expanded(self) -> int:
        """Number of elements per token in a full cache of all heads' keys and values."""
        return self.heads * (self.head + self.value)

    @property
    def crossover(self) -> float:
        """Number of queries above which the expanded form is cheaper, in the limit of many keys."""
        more = 2 * self.latent + self.rotated - self.head - self.value
        return self.latent * (self.plain + self.value) / more if more > 0 else float("inf")

    def cost(self, form: Form, q_len: int, kv_len: int) -> int:
        """Return the number of multiplications per head in one form of unmasked latent attention."""
        weights = self.latent * (self.plain + self.value)
        if form == "expanded":
            return kv_len * weights + q_len * kv_len * (self.head + self.value)
        return q_len * weights + q_len * kv_len * (self.cached + self.latent)

    def cheaper(self, q_len: int, kv_len: int) -> Form:
        """Return the form of latent attention with fewer multiplications, "expanded" or "absorbed"."""
        costs = {form: self.cost(form, q_len, kv_len) for form in FORMS[1:]}
        return min(costs, key=costs.__getitem__)  # expanded in case of a tie


class Expanded(NamedTuple):
    """The attention matrix of the expanded form, together with the values of all heads."""

    matrix: Matrix
    values: Tensor

    def matmul(self, latents: Tensor, *, dropout_p: float = 0.0) -> Tensor:
        """Multiply the attention matrix by the values of all heads.

        The argument ``latents`` is ignored, because the values have already been computed from the latents.
        """
        del latents
        return self.matrix.matmul(self.values, dropout_p=dropout_p)


class Expanding(nn.Module):
    """The mechanism for the expanded form of latent attention, which computes keys and values from cached latents.

    It is a module so that the cache can check whether its parameters require a gradient.

    Args:
        mechanism: the layer's mechanism.
        expansion: the linear layer that maps latents to keys and values, ``[latent, heads * (plain + value)]``.
        sizes: the layer's sizes.
    """

    def __init__(self, mechanism: Mechanism, expansion: nn.Module, sizes: LatentSizes):
        super().__init__()
        self.mechanism, self.expansion, self.sizes = mechanism, expansion, sizes

    @property
    def index_key(self) -> Tensor | None:
        """The index keys of the layer's mechanism, or None if it has none; see `saccade.mechanisms.TopK`."""
        return getattr(self.mechanism, "index_key", None)

    def with_index_key(self, index_key: Tensor) -> Expanding:
        """Return this mechanism with the index keys of all tokens so far. Caches call this method."""
        mechanism: Any = self.mechanism
        return Expanding(mechanism.with_index_key(index_key), self.expansion, self.sizes)

    def forward(
        self,
        query: Tensor,
        key: Tensor,
        *,
        mask: object = None,
        q_positions: GivenPositions = None,
        kv_positions: GivenPositions = None,
    ) -> Expanded:
        """Return the attention matrix of the expanded form, together with the values of all heads.

        Args:
            query: ``[batch, heads, q_len, head]``.
            key: the latents, ``[batch, 1, kv_len, cached]``.
        """
        sizes = self.sizes
        latents, rotated = key[:, 0].split([sizes.latent, sizes.rotated], -1)
        both = self.expansion(latents).unflatten(-1, (sizes.heads, -1)).transpose(1, 2)
        plain, values = both.split([sizes.plain, sizes.value], -1)
        shared = rotated[:, None].expand(-1, sizes.heads, -1, -1).to(plain.dtype)
        keys = torch.cat([plain, shared], -1)
        matrix = self.mechanism(query, keys, mask=mask, q_positions=q_positions, kv_positions=kv_positions)
        return Expanded(matrix, values)


def absorb(query: Tensor, weight: Tensor, sizes: LatentSizes) -> Tensor:
    """Transform queries so that their scores with latents equal the scores of ``query`` with expanded keys.

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


def expand_values(attended: Tensor, weight: Tensor, sizes: LatentSizes) -> Tensor:
    """Expand attention-weighted latents, ``[..., latent]``, to the heads' output, ``[batch, heads, q_len, value]``."""
    value_weight = weight.unflatten(0, (sizes.heads, -1))[:, sizes.plain :]
    return torch.einsum("bhqc,hvc->bhqv", attended, value_weight)
