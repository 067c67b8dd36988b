"""The positions passed to an attention call, and the heads that the call projects."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor, nn

from saccade.masks import Mask
from saccade.masks.rules.documents import positions_in_documents
from saccade.positions import QueryTemperature
from saccade.positions.token_positions import GivenPositions, Positions


class Heads(NamedTuple):
    """The projected and rotated query, key and value heads of one attention call.

    ``key`` and ``value`` are unused if a filled CrossCache provides the keys and values.
    """

    query: Tensor
    key: Tensor
    value: Tensor
    mask: Mask | None
    positions: Positions | None
    kv_positions: Positions | None


class CallPositions(NamedTuple):
    """The positions passed to an attention call: of queries, of keys, and for the rotation only."""

    positions: GivenPositions = None
    kv_positions: GivenPositions = None
    rotary_positions: GivenPositions = None


def rotation_positions(
    given: range | Tensor | None,
    places: tuple[Positions | None, Positions | None],
    lengths: tuple[int, int],
    mask: Mask | None,
) -> tuple[range | Tensor, range | Tensor, tuple[range | Tensor, Mask | None]]:
    """Return the rotary positions of queries and of keys, and the positions and mask for the `QueryTemperature`.

    Args:
        given: the positions for the rotation only, or None.
        places: the positions of queries and of keys, each None for the default.
        lengths: numbers of queries and of keys.
        mask: the mask; positions for the temperature restart in each of its documents.
    """
    (q_len, kv_len), (q_places, kv_places) = lengths, places
    q_positions = (Positions.between(kv_len - q_len, kv_len) if q_places is None else q_places).given
    if given is None:
        kv_positions = (Positions.between(0, kv_len) if kv_places is None else kv_places).given
        return q_positions, kv_positions, (q_positions, mask)
    has_axes = isinstance(given, Tensor) and given.dim() > 2
    return given, given, (q_positions, mask) if has_axes else (given, None)


def rotated_together(
    query: Tensor, key: Tensor, rotary: nn.Module, positions: range | Tensor | None
) -> tuple[Tensor, Tensor]:
    """Rotate queries and keys with the same positions in one call, which for a single token takes half the time.

    Args:
        query, key: ``[batch, heads, len, head_dim]``; the numbers of heads may differ.
        rotary: the rotary embedding, which treats all heads alike.
        positions: the positions of both.
    """
    heads = query.shape[1]
    both = rotary(torch.cat([query, key], 1), positions)
    return both.narrow(1, 0, heads), both.narrow(1, heads, key.shape[1])


def with_temperature(
    query: Tensor, temperature: QueryTemperature | None, positions: GivenPositions, mask: Mask | None
) -> Tensor:
    """Multiply queries ``[batch, heads, len, head_dim]`` by the factors for their positions within their documents."""
    if temperature is None:
        return query
    factors = temperature.factors(positions_in_documents(positions, mask), dtype=query.dtype)
    return query * factors[:, None, :, None].to(query.device)
