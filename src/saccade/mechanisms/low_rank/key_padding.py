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
    def of(cls, inputs: Inputs) -> Tokens:
        """Those of checked inputs."""
        rows, keys = inputs.written_out()
        lost, hidden = _nowhere(inputs, rows), hidden_at(inputs, keys)
        query = inputs.query.to(inputs.wide).masked_fill(lost[:, None, :, None], 0.0)
        key = inputs.key.to(inputs.wide).masked_fill(hidden[:, None, :, None], 0.0)
        return cls(query, key, rows, keys, lost, hidden)


def hidden_at(inputs: Inputs, positions: Tensor) -> Tensor:
    """Whether the mask hides keys at positions ``[batch | 1, len]``: bool ``[batch, len]``."""
    hidden = _nowhere(inputs, positions)
    if isinstance(inputs.rule, Full):
        return hidden
    items = torch.arange(inputs.shape[0], device=positions.device)[:, None]
    nobody = torch.zeros_like(items)
    return hidden | ~inputs.rule.allows(items, nobody, nobody, positions.clamp(min=0))


def why_not_keys_only(mask: Mask, because: str) -> tuple[str, ...]:
    """Why a mask cannot be had that does more than hide keys; empty for one that does not."""
    return tuple(
        f"{type(part).__name__} lets queries see different keys: {because}"
        for part in parts_of(mask)
        if not part.hides_keys_only
    )


def _nowhere(inputs: Inputs, positions: Tensor) -> Tensor:
    """Where no token stands, bool ``[batch, len]``."""
    return ((positions < 0) & inputs.is_placed).expand(inputs.shape[0], -1)
