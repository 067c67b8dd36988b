"""The recurrence itself, token by token: for decoding, and wherever single operations of torch are needed."""

from __future__ import annotations

import torch
from torch import Tensor

from saccade.mechanisms.recurrences.recurrence_spec import Rule

__all__ = ["FEW", "stepped"]

FEW = 2  # tokens, up to which a chunk costs more than its steps


def stepped(rule: Rule, value: Tensor, state: Tensor, segment: Tensor | None) -> tuple[Tensor, Tensor]:
    """Return the result of `product` by definition; differentiable any number of times, in both directions.

    Cost: a few passes over the state for each token; where gradients are wanted, every state is kept.
    """
    out = []
    for i in range(rule.key.shape[1]):
        query, key, written = rule.query[:, i], rule.key[:, i], value[:, i]
        if rule.segments is not None and segment is not None:
            is_same, segment = segment == rule.segments[:, i], rule.segments[:, i]
            state = state.masked_fill(~is_same[:, None, None], 0.0)
        if rule.decay is not None:
            state = state * rule.decay[:, i].exp()[..., None]
        if rule.is_delta:
            written = written - (key[:, None] @ state)[:, 0]
        if rule.beta is not None:
            written = written * rule.beta[:, i]
        state = torch.baddbmm(state, key[..., None], written[:, None])
        out.append((query[:, None] @ state)[:, 0] * rule.scale)
    return (torch.stack(out, 1) if out else value), state
