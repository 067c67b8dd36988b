"""The positions of an attention layer's call, and the heads that it projects."""

from __future__ import annotations

from typing import NamedTuple

from torch import Tensor

from saccade.masks import Mask
from saccade.masks.rules.documents import positions_in_documents
from saccade.positions import QueryTemperature
from saccade.positions.token_positions import GivenPositions, Positions


class Heads(NamedTuple):
    """The projected and rotated query, key and value heads of one attention call.

    Once a CrossCache is filled, ``key`` and ``value`` are not used.
    """

    query: Tensor
    key: Tensor
    value: Tensor
    mask: Mask | None
    positions: Positions | None
    kv_positions: Positions | None


class Places(NamedTuple):
    """The positions that a call passes: of queries, of keys, and those for the rotation alone."""

    positions: GivenPositions = None
    kv_positions: GivenPositions = None
    rotary_positions: GivenPositions = None


def with_temperature(
    query: Tensor, temperature: QueryTemperature | None, positions: GivenPositions, mask: Mask | None
) -> Tensor:
    """Multiply queries ``[batch, heads, len, head_dim]`` by the factors of their positions in their texts."""
    if temperature is None:
        return query
    factors = temperature.factors(positions_in_documents(positions, mask), dtype=query.dtype)
    return query * factors[:, None, :, None].to(query.device)
