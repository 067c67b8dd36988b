"""Where the tokens after these will stand, for caches that hold no order."""

from __future__ import annotations

import torch
from torch import Tensor

from saccade.errors import value_error

__all__ = ["following", "from_here"]


def from_here(upcoming: int | Tensor, q_len: int) -> range | Tensor:
    """Where the next tokens will stand: from a number on, or from one for each item, int64 ``[batch]``."""
    if isinstance(upcoming, int):
        return range(upcoming, upcoming + q_len)
    return upcoming[:, None] + torch.arange(q_len, device=upcoming.device)


def following(
    upcoming: int | Tensor,
    positions: range | Tensor,
    batch: int,
    device: torch.device,
    where: str,
    *,
    begun: bool,
    hint: str,
) -> int | Tensor:
    """Where the next token of each item will stand; raises where these do not come after the ones before.

    Args:
        upcoming: where these were expected: a number, or int64 ``[batch]``.
        positions: of the new tokens, checked.
        batch, device: of the cache.
        where, hint: for the error.
        begun: whether any token came before.
    """
    rule = "come after those in the cache, one behind the other"
    if isinstance(positions, range) and isinstance(upcoming, int):
        goes_back = begun and len(positions) > 0 and positions[0] < upcoming
        if goes_back or (positions.step != 1 and len(positions) > 1):
            raise value_error(where, "positions", rule, positions, hint=hint)
        return positions.stop if len(positions) else upcoming
    given = torch.tensor(positions) if isinstance(positions, range) else positions
    table = torch.atleast_2d(given).to(device).expand(batch, given.shape[-1])
    reached = torch.as_tensor(upcoming, device=device).expand(batch)
    floor = reached if begun else torch.zeros_like(reached)
    before = torch.cat([floor[:, None] - 1, table], 1).cummax(1).values
    if bool(((table >= 0) & (table <= before[:, :-1])).any()):
        raise value_error(where, "positions", rule, "others", hint=hint)
    after = before[:, -1] + 1
    # The same for all: a number, which costs nothing.
    return int(after[0]) if len(after) and bool((after == after[0]).all()) else after
