"""Which tokens take part, under a mask that hides keys and does nothing else."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from saccade.masks import Full, Mask
from saccade.mechanisms.checked_mechanism import Inputs, parts_of

__all__ = ["Tokens", "hidden_at", "why_not_keys_only"]


class Tokens(NamedTuple):
    """Queries and keys, 0 where a token takes no part.

    What is not finite is not kept apart: every row sees every slot.

    Attributes:
        query: ``[batch, heads, q_len, head_dim]``, in float32 or wider.
        key: ``[batch, kv_heads, kv_len, head_dim]``, in float32 or wider.
        rows, keys: positions, int64 ``[batch | 1, len]``.
        lost: bool ``[batch, q_len]``, rows where no token stands.
        hidden: bool ``[batch, kv_len]``, keys that nobody may attend to.
    """

    query: Tensor
    key: Tensor
    rows: Tensor
    keys: Tensor
    lost: Tensor
    hidden: Tensor

    @classmethod
    def of(cls, given: Inputs) -> Tokens:
        """Return the tokens of checked inputs."""
        rows, keys = given.written_out()
        lost, hidden = _nowhere(given, rows), hidden_at(given, keys)
        query = given.query.to(given.wide).masked_fill(lost[:, None, :, None], 0.0)
        key = given.key.to(given.wide).masked_fill(hidden[:, None, :, None], 0.0)
        return cls(query, key, rows, keys, lost, hidden)


def hidden_at(given: Inputs, positions: Tensor) -> Tensor:
    """Return whether the mask hides keys at positions ``[batch | 1, len]``: bool ``[batch, len]``."""
    hidden = _nowhere(given, positions)
    if isinstance(given.rule, Full):
        return hidden
    items = torch.arange(given.shape[0], device=positions.device)[:, None]
    nobody = torch.zeros_like(items)
    return hidden | ~given.rule.allows(items, nobody, nobody, positions.clamp(min=0))


def why_not_keys_only(mask: Mask, because: str) -> tuple[str, ...]:
    """Return why a mask that does more than hide keys is not supported; empty for one that does not."""
    return tuple(
        f"{type(part).__name__} lets queries see different keys: {because}"
        for part in parts_of(mask)
        if not part.hides_keys_only
    )


def _nowhere(given: Inputs, positions: Tensor) -> Tensor:
    """Return which positions are padding, bool ``[batch, len]``."""
    return ((positions < 0) & given.is_placed).expand(given.shape[0], -1)
