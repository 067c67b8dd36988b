"""Reach: how far a sum over keys may go: all, those of a document, those before; and which tokens are left out."""

from __future__ import annotations

import dataclasses

import torch
from torch import Tensor

from saccade.engine.at_positions import Positions, first_position
from saccade.masks import And, Causal, Dense, Documents, Full, Mask, Padding
from saccade.mechanisms.readable import is_readable, unless_none

__all__ = ["Reach", "parts_of", "picks_keys", "why_no_sum", "written_out"]


def parts_of(mask: Mask) -> tuple[Mask, ...]:
    """The rules that a mask joins by ``&``; the mask itself if it joins none."""
    return mask.parts if isinstance(mask, And) else (mask,)


def picks_keys(mask: Mask) -> bool:
    """True if a rule leaves out keys, and the same ones for every query and head."""
    if type(mask) is Dense:
        return mask.allowed.shape[1:3] == (1, 1)
    return type(mask) in (Full, Padding)


def why_no_sum(mask: Mask) -> tuple[str, ...]:
    """Why no sum over keys has this mask; empty for Causal, Padding, Documents and what ``&`` joins of them."""
    reasons = []
    for part in parts_of(mask):
        if type(part) is Documents:
            inner = () if part.rule is None else parts_of(part.rule)
            reasons += [
                f"{type(rule).__name__} inside Documents is not Causal: a sum over keys is all that is kept of them"
                for rule in inner
                if type(rule) not in (Causal, Full)
            ]
        elif type(part) is not Causal and not picks_keys(part):
            name = type(part).__name__
            reasons.append(
                f"{name} is none of Causal, Padding and Documents: a sum over keys is all that is kept of them, "
                "so queries cannot choose among them"
            )
    return tuple(reasons)


@dataclasses.dataclass(frozen=True)
class Reach:
    """A mask for which `why_no_sum` has no reasons, at given positions, as sums over keys need it.

    Attributes:
        rule: the mask itself.
        is_given: whether somebody said where tokens stand: then a position below 0 means that none does.
        causal: whether rows see no later key.
        offset: row i stands where key ``i + offset`` does, and all follow one another; None if that is not so.
        q_positions, kv_positions: int64 ``[batch | 1, len]``; -1 for no token.
        hidden_rows, hidden_keys: bool ``[batch | 1, len]``, those that see nothing and are not seen; None where
            there are surely none.
        q_segments, kv_segments: int64 ``[batch | 1, len]``, the document of a token; None without documents. A token
            in none counts to the one before it, and is hidden.
    """

    rule: Mask
    is_given: bool
    causal: bool
    offset: int | None
    q_positions: Tensor
    kv_positions: Tensor
    hidden_rows: Tensor | None
    hidden_keys: Tensor | None
    q_segments: Tensor | None
    kv_segments: Tensor | None

    @classmethod
    def of(
        cls,
        rule: Mask,
        shape: tuple[int, int, int, int],
        q_positions: Positions,
        kv_positions: Positions,
        device: torch.device,
    ) -> Reach:
        """Read a mask at positions, whose defaults are those of every mask."""
        batch, _, q_len, kv_len = shape
        starts = _starts(q_positions, kv_positions, q_len, kv_len)
        q, kv, is_given = written_out(q_positions, kv_positions, q_len, kv_len, device)
        parts = parts_of(rule)
        causal = any(type(part) is Causal for part in parts)
        # Positions that nobody wrote out are those of tokens. Before the first key stand rows without positions of
        # their own, if there are more queries than keys.
        lost_rows = q < 0 if isinstance(q_positions, Tensor) else None
        lost_keys = kv < 0 if isinstance(kv_positions, Tensor) else None
        segments: tuple[Tensor, Tensor] | None = None
        for part in parts:
            if type(part) is Documents:
                causal |= part.rule is not None and any(type(inner) is Causal for inner in parts_of(part.rule))
                own = tuple(_documents(part, x) for x in (q, kv))
                lost_rows, lost_keys = _either(lost_rows, own[0] < 0), _either(lost_keys, own[1] < 0)
                count = max(map(len, part.lengths))
                if segments is not None:  # a document of both: numbered by pairs
                    own = tuple(before * count + x for before, x in zip(segments, own, strict=True))
                segments = (own[0], own[1])
            elif type(part) in (Padding, Dense):
                items = torch.arange(batch, device=device)[:, None]
                nobody = torch.zeros_like(items)
                lost_keys = _either(lost_keys, ~part.allows(items, nobody, nobody, kv.clamp(min=0)))
        offset = None
        if starts[0] is not None and starts[1] is not None:
            offset = starts[0] - starts[1]
        elif causal and q_len <= kv_len and _is_end_of(q, kv):
            offset = kv_len - q_len
        if segments is not None:
            segments = (segments[0].cummax(1).values, segments[1].cummax(1).values) if offset is not None else segments
        return cls(
            rule,
            is_given,
            causal,
            offset,
            q,
            kv,
            None if lost_rows is None else unless_none(lost_rows),
            None if lost_keys is None else unless_none(lost_keys),
            *(segments or (None, None)),
        )

    @property
    def hides_nothing(self) -> bool:
        """True if every row sees every key."""
        return not self.causal and self.hidden_rows is self.hidden_keys is self.q_segments is None

    def allowed(self, batch: slice, rows: range, columns: range) -> Tensor:
        """Which pairs the mask allows, by its own definition: bool ``[batch, 1, rows, columns]``."""
        items = torch.arange(batch.start, batch.stop, device=self.q_positions.device)
        q = self.q_positions if len(self.q_positions) == 1 else self.q_positions[batch]
        kv = self.kv_positions if len(self.kv_positions) == 1 else self.kv_positions[batch]
        q, kv = q[:, None, rows.start : rows.stop, None], kv[:, None, None, columns.start : columns.stop]
        b = items[:, None, None, None]
        allowed = self.rule.allows(b, torch.zeros_like(b), q, kv)
        if self.is_given:
            allowed = allowed & (q >= 0) & (kv >= 0)
        return allowed.expand(len(items), 1, len(rows), len(columns))


def written_out(
    q_positions: Positions, kv_positions: Positions, q_len: int, kv_len: int, device: torch.device
) -> tuple[Tensor, Tensor, bool]:
    """Positions as int64 ``[batch | 1, len]``, and whether somebody gave them: then those below 0 mean no token."""
    starts = _starts(q_positions, kv_positions, q_len, kv_len)
    q = _table(q_positions, starts[0], q_len, device)
    return q, _table(kv_positions, starts[1], kv_len, device), q_positions is not None or kv_positions is not None


def _starts(q_positions: Positions, kv_positions: Positions, q_len: int, kv_len: int) -> tuple[int | None, int | None]:
    """Where the first query and key stand, if the others follow them one by one; None for those that do not."""
    if q_positions is None and kv_positions is None:
        return kv_len - q_len, 0
    return first_position(q_positions, 0), first_position(kv_positions, 0)


def _table(positions: Positions, start: int | None, length: int, device: torch.device) -> Tensor:
    if isinstance(positions, Tensor):
        return torch.atleast_2d(positions.to(device)).clamp(min=-1)
    if isinstance(positions, range):
        return torch.arange(positions.start, positions.stop, positions.step, device=device)[None]
    first = 0 if start is None else start
    return torch.arange(first, first + length, device=device)[None]


def _either(marks: Tensor | None, others: Tensor) -> Tensor:
    return others if marks is None else marks | others


def _documents(mask: Documents, positions: Tensor) -> Tensor:
    """The document at each position, -1 for none."""
    longest = max(map(len, mask.lengths))
    padded = [(*item, *(0 for _ in range(longest - len(item)))) for item in mask.lengths]
    ends = torch.tensor(padded, dtype=torch.int64, device=positions.device).reshape(len(padded), longest).cumsum(1)
    items = max(len(ends), len(positions))
    own = torch.searchsorted(ends.expand(items, -1).contiguous(), positions.expand(items, -1).contiguous(), right=True)
    return own.masked_fill((positions < 0) | (own >= longest), -1)


def _is_end_of(q: Tensor, kv: Tensor) -> bool:
    """True if the queries are surely the last of the keys, and the keys stand in order, gaps and -1 aside."""
    if not (is_readable(q, kv) and torch.equal(*torch.broadcast_tensors(q, kv[:, kv.shape[1] - q.shape[1] :]))):
        return False
    before = kv.cummax(1).values[:, :-1]
    return bool(((kv[:, 1:] > before) | (kv[:, 1:] < 0)).all())
