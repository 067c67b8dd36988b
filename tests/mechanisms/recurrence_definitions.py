"""Recurrences by definition, and cases of them whose gates come of the keys."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor
from torch.nn import functional as F

from saccade import mechanisms
from saccade.matrix import Matrix

__all__ = ["RULES", "STEPS", "Gates", "Gated", "dense"]

Gates = dict[str, Tensor]


def dense(
    query: Tensor, key: Tensor, gates: Gates, *, scale: float, is_delta: bool, allowed: Tensor | None = None
) -> Tensor:
    """``A_ij = s β_j q_i · (M_i ... M_{j+1} k_j)``, one product at a time of all ``k_j`` so far, in float64.

    Args:
        query, key: ``[batch, heads, len, head_dim]``.
        gates: ``decay [batch, heads, len, 1 | head_dim]``, ``beta [batch, heads, len]`` and ``erase [batch, heads,
            len, head_dim]``, or some of them.
        allowed: bool ``[batch, len, len]``: a pair of which a token in between stands elsewhere is passed on unchanged.
    """
    batch, heads, length, width = key.shape
    decay = gates.get("decay", key.new_zeros(batch, heads, length, 1)).expand(-1, -1, -1, width)
    beta = gates.get("beta", key.new_ones(batch, heads, length))
    erased = key * gates.get("erase", 1.0)
    found = key.new_zeros(batch, heads, length, length)
    left = key[:, :, :0]  # [batch, heads, tokens before i, width], what is left of each k_j
    for i in range(length):
        own = key[:, :, i, None]
        passed = left * decay[:, :, i, None].exp()
        if is_delta:
            overlap = (passed * erased[:, :, i, None]).sum(-1, keepdim=True)
            passed = passed - beta[:, :, i, None, None] * own * overlap
        if allowed is not None:
            passed = torch.where(allowed[:, i, i, None, None, None], passed, left)
        left = torch.cat([passed, own], 2)
        row = scale * beta[:, :, : i + 1] * (query[:, :, i, None] * left).sum(-1)
        found[:, :, i, : i + 1] = row if allowed is None else row.where(allowed[:, None, i, : i + 1], 0.0)
    return found


class Gated(mechanisms.Mechanism):
    """A recurrence whose gates come of the keys, so that it is called like any other mechanism."""

    def __init__(self, inner: mechanisms.Mechanism, make: Callable[[Tensor], Gates], *, has_unit_keys: bool = False):
        super().__init__()
        self.inner, self.make, self.has_unit_keys = inner, make, has_unit_keys

    def gates(self, key: Tensor) -> Gates:
        return self.make(key.nan_to_num())  # what a key's NaN does to its gates is not asked here

    def keys(self, key: Tensor) -> Tensor:
        if not self.has_unit_keys:
            return key
        return torch.where(key.isfinite().all(-1, keepdim=True), F.normalize(key.nan_to_num(), dim=-1), key)

    def reads(self, query: Tensor, key: Tensor, gates: Gates, allowed: Tensor) -> Tensor:
        """The queries that read the state."""
        return query

    def begins(self, state: Tensor) -> Tensor:
        """A state that the rule can have, of any tensor of the state's size."""
        return state

    def defined(self, query: Tensor, key: Tensor, gates: Gates, allowed: Tensor) -> Tensor:
        """The matrix by definition, for keys and gates of as many heads as the queries."""
        scale = query.shape[3] ** -0.5 if self.inner.scale is None else self.inner.scale
        reads = self.reads(query, key, gates, allowed)
        return dense(reads, key, gates, scale=scale, is_delta=self.inner.is_delta, allowed=allowed)

    def reasons(self, mask):
        return self.inner.reasons(mask)

    def new_cache(self, max_len=None):
        return self.inner.new_cache(max_len)

    def forward(self, query, key, *, mask=None, q_positions=None, kv_positions=None) -> Matrix:
        facts = {"mask": mask, "q_positions": q_positions, "kv_positions": kv_positions}
        return self.inner(query, self.keys(key), **self.gates(key), **facts)


def _write(key: Tensor) -> Tensor:
    return torch.sigmoid(key.sum(-1))


def _fade(key: Tensor) -> Tensor:
    return -F.softplus(key.sum(-1) - 1.0)


def _fade_by_channel(key: Tensor) -> Tensor:
    return -F.softplus(2.0 * key)


def _fade_fast(key: Tensor) -> Tensor:
    return -50.0 * F.softplus(2.0 * key)


class Solving(Gated):
    """Mesa: queries are the solutions of one linear system for each token, written out."""

    def reads(self, query: Tensor, key: Tensor, gates: Gates, allowed: Tensor) -> Tensor:
        batch, heads, length, width = query.shape
        ridge = self.inner.ridge.to(query).expand(heads, width)
        state = query.new_zeros(batch, heads, width, width)
        rows = []
        for i in range(length):
            key_i, write = key[:, :, i], gates["beta"][:, :, i, None, None]
            fresh = state * gates["decay"][:, :, i, :, None].exp() + write * key_i[..., None] * key_i[..., None, :]
            starts = ~allowed[:, i, :i].any(-1)  # of this text, nothing was seen before
            fresh = torch.where(starts[:, None, None, None], write * key_i[..., None] * key_i[..., None, :], fresh)
            state = torch.where(allowed[:, i, i, None, None, None], fresh, state)
            rows.append(torch.linalg.solve(state + torch.diag_embed(ridge), query[:, :, i]))
        return torch.stack(rows, 2) if rows else query

    def begins(self, state: Tensor) -> Tensor:
        extra = torch.randn(*state.shape[:3], state.shape[2], dtype=state.dtype)
        return torch.cat([extra @ extra.mT, state], 3)


class Rotating(Gated):
    """Mamba-3: a state of complex numbers, to which each token writes what is left of the one before it, and itself."""

    def defined(self, query: Tensor, key: Tensor, gates: Gates, allowed: Tensor) -> Tensor:
        length = query.shape[2]
        read, written = (torch.view_as_complex(x.unflatten(3, (-1, 2)).contiguous()) for x in (query, key))
        state = previous = written.new_zeros(*written.shape[:2], written.shape[3], length)
        one_hot, rows = torch.eye(length, dtype=written.dtype), []
        for i in range(length):
            step, blend, decay, angle = (gates[name][:, :, i] for name in ("step", "blend", "decay", "angle"))
            starts = ~allowed[:, i, :i].any(-1)[:, None, None, None]  # of this text, nothing was seen before
            old, before = (x.masked_fill(starts, 0.0) for x in (state, previous))
            own = written[:, :, i, :, None] * one_hot[i]
            factor = torch.exp(torch.complex(decay.expand_as(angle), -angle))[..., None]
            fresh = factor * (old + ((1 - blend) * step)[..., None] * before) + (blend * step)[..., None] * own
            is_here = allowed[:, i, i, None, None, None]
            state, previous = torch.where(is_here, fresh, state), torch.where(is_here, own, previous)
            rows.append((read[:, :, i, None].conj() @ state).real[:, :, 0])
        return torch.stack(rows, 2).where(allowed[:, None], 0.0) if rows else query.new_zeros(*query.shape[:2], 0, 0)

    def begins(self, state: Tensor) -> Tensor:
        return F.pad(state, (0, 1, 0, 1), value=0.7)


RULES: dict[str, Gated] = {
    "sums": Gated(mechanisms.GatedLinear(), lambda key: {}),
    "gated linear": Gated(mechanisms.GatedLinear(), lambda key: {"decay": _fade(key)}),
    "gated by channel": Gated(
        mechanisms.GatedLinear(scale=1.0), lambda key: {"decay": _fade_by_channel(key), "beta": _write(key)}
    ),
    "mesa": Solving(
        mechanisms.Mesa(0.5),
        lambda key: {"beta": _write(key), "decay": _fade(key)},
        has_unit_keys=True,
    ),
    "mamba-3": Rotating(
        mechanisms.Mamba3(),
        lambda key: {
            "step": F.softplus(key.sum(-1)),
            "blend": torch.sigmoid(key[..., 0]),
            "decay": _fade(key),
            "angle": 2.0 * key[..., : key.shape[-1] // 2],
        },
    ),
    "delta": Gated(mechanisms.Delta(), lambda key: {"beta": _write(key)}, has_unit_keys=True),
    "gated delta": Gated(
        mechanisms.Delta(), lambda key: {"beta": _write(key), "decay": _fade(key)}, has_unit_keys=True
    ),
    "kda": Gated(
        mechanisms.Delta(), lambda key: {"beta": _write(key), "decay": _fade_by_channel(key)}, has_unit_keys=True
    ),
    "gated delta 2": Gated(
        mechanisms.GatedDelta2(),
        lambda key: {"erase": torch.sigmoid(3.0 * key.flip(-1)), "decay": _fade_by_channel(key)},
        has_unit_keys=True,
    ),
    "kda, fast": Gated(
        mechanisms.Delta(), lambda key: {"beta": _write(key), "decay": _fade_fast(key)}, has_unit_keys=True
    ),
}


class Several(Gated):
    """DeltaProduct of two steps: one with the key, and one with its mirror image."""

    def keys(self, key: Tensor) -> Tensor:
        unit = super().keys(key)
        return torch.cat([unit, unit.flip(-1)], -1)


STEPS: dict[str, Gated] = {
    "delta product": Several(
        mechanisms.DeltaProduct(2),
        lambda key: {"beta": 2.0 * torch.sigmoid(key[..., :2]), "decay": _fade(key)},
        has_unit_keys=True,
    ),
    "rwkv-7": Gated(
        mechanisms.RWKV7(),
        lambda key: {
            "decay": -0.6 * torch.sigmoid(2.0 * key),
            "removal": F.normalize(key.flip(-1), dim=-1),
            "rate": torch.sigmoid(key),
        },
    ),
}
"""Recurrences of several steps for each token."""
