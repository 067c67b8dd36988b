"""The masks that linear attention supports: those that a sum over keys can implement."""

from __future__ import annotations

import dataclasses

import torch
from torch import Tensor

from saccade.masks import Causal, Documents, Full, Mask
from saccade.matrix import Block
from saccade.mechanisms.checked_mechanism import Inputs, parts_of
from saccade.mechanisms.readable_tensors import is_readable, marks_or_none
from saccade.support.language import Message


def why_no_sum(mask: Mask) -> tuple[str, ...]:
    """Return the reasons why linear attention, which sums over keys, cannot implement a mask.

    The tuple is empty for Causal, Documents, masks that depend only on keys (Padding), and combinations of these with
    ``&``.
    """
    reasons: list[str] = []
    for part in parts_of(mask):
        if isinstance(part, Documents):
            reasons += [
                Message(
                    "{mask} inside Documents is not Causal: only a sum over keys is stored", mask=type(rule).__name__
                )
                for rule in _masks_in_documents(part)
                if not isinstance(rule, Causal | Full)
            ]
        elif not (isinstance(part, Causal) or part.hides_keys_only):
            reasons.append(
                Message(
                    "{mask} is none of Causal, Padding and Documents: only a sum over keys is stored, so queries "
                    "cannot choose among keys",
                    mask=type(part).__name__,
                )
            )
    return tuple(reasons)


@dataclasses.dataclass(frozen=True)
class Visible:
    """A mask that linear attention supports, evaluated at the positions of queries and keys.

    Attributes:
        rule: the mask itself.
        is_placed: whether positions were passed; a position below 0 then means padding.
        causal: whether later keys are masked for each row.
        offset: query i has the position of key ``i + offset``. None if tokens are not known to be in order.
        q_positions, kv_positions: int64 ``[batch | 1, len]``; -1 for padding.
        hidden_rows, hidden_keys: bool ``[batch | 1, len]``, rows that attend to no key because they are padding or
            outside all documents, and keys to which no row may attend; None if there are known to be none.
        q_documents, kv_documents: int64 ``[batch | 1, len]``, the document of each token; None without documents. A
            token outside all documents is hidden. If tokens are in order, it counts as part of the document before it.
    """

    rule: Mask
    is_placed: bool
    causal: bool
    offset: int | None
    q_positions: Tensor
    kv_positions: Tensor
    hidden_rows: Tensor | None
    hidden_keys: Tensor | None
    q_documents: Tensor | None
    kv_documents: Tensor | None

    @classmethod
    def of(cls, inputs: Inputs) -> Visible:
        """Evaluate a mask that linear attention supports at the positions of the tokens."""
        parts = [part for part in parts_of(inputs.rule) if not isinstance(part, Full)]
        packs = [part for part in parts if isinstance(part, Documents)]
        q, kv = inputs.position_tables()
        causal = any(isinstance(rule, Causal) for part in parts for rule in (part, *_masks_in_documents(part)))
        # Default positions are never padding, even if they are below 0 because there are more queries than keys.
        lost_rows = [q < 0] if inputs.q_positions is not None and inputs.q_positions.run is None else []
        lost_keys = [kv < 0] if inputs.kv_positions is not None and inputs.kv_positions.run is None else []
        documents: list[Tensor] = []
        for number, pack in enumerate(packs):
            tables = [_documents(pack, x) for x in (q, kv)]
            lost_rows.append(tables[0] < 0)
            lost_keys.append(tables[1] < 0)
            count = max(map(len, pack.lengths))  # the indices of several Documents masks together identify a document
            documents = [x * count + y for x, y in zip(documents, tables, strict=True)] if number else tables
        items = torch.arange(inputs.shape[0], device=q.device)[:, None]
        zeros = torch.zeros_like(items)
        lost_keys += [~part.allows(items, zeros, zeros, kv.clamp(min=0)) for part in parts if part.hides_keys_only]
        offset = _offset(inputs, q, kv, causal)
        if documents and offset is not None:
            documents = [x.cummax(1).values for x in documents]
        hidden = (_union(lost_rows), _union(lost_keys))
        return cls(inputs.rule, inputs.is_placed, causal, offset, q, kv, *hidden, *(documents or (None, None)))

    @property
    def hides_nothing(self) -> bool:
        """Whether every row is known to see every key."""
        return not self.causal and self.hidden_rows is self.hidden_keys is self.q_documents is None

    def allowed(self, batch: slice, rows: range, columns: range) -> Tensor:
        """Return which pairs of the rows and columns the mask allows, bool ``[batch, 1, rows, columns]``."""
        items = torch.arange(batch.start, batch.stop, device=self.q_positions.device)
        q = self.q_positions if len(self.q_positions) == 1 else self.q_positions[batch]
        kv = self.kv_positions if len(self.kv_positions) == 1 else self.kv_positions[batch]
        q, kv = q[:, None, rows.start : rows.stop, None], kv[:, None, None, columns.start : columns.stop]
        b = items[:, None, None, None]
        allowed = self.rule.allows(b, torch.zeros_like(b), q, kv)
        if self.is_placed:
            allowed = allowed & (q >= 0) & (kv >= 0)
        return allowed.expand(len(items), 1, len(rows), len(columns))

    def in_block(self, block: Block) -> Tensor:
        """Return which pairs of a block the mask allows, bool ``[batch, 1, rows, columns]``."""
        return torch.cat([self.allowed(block.batch, block.rows, keys) for keys in block.columns], -1)


def _masks_in_documents(part: Mask) -> tuple[Mask, ...]:
    """Return the masks that a Documents mask applies within each document."""
    return parts_of(part.rule) if isinstance(part, Documents) and part.rule is not None else ()


def _union(marks: list[Tensor]) -> Tensor | None:
    """Return the union of bool marks, or None if it is known to be empty."""
    if not marks:
        return None
    union = marks[0]
    for other in marks[1:]:
        union = union | other
    return marks_or_none(union)


def _documents(mask: Documents, positions: Tensor) -> Tensor:
    """Return the index of the document at each position, or -1 outside all documents."""
    longest = max(map(len, mask.lengths))
    padded = [(*item, *(0 for _ in range(longest - len(item)))) for item in mask.lengths]
    ends = torch.tensor(padded, dtype=torch.int64, device=positions.device).reshape(len(padded), longest).cumsum(1)
    items = max(len(ends), len(positions))
    document = torch.searchsorted(
        ends.expand(items, -1).contiguous(), positions.expand(items, -1).contiguous(), right=True
    )
    return document.masked_fill((positions < 0) | (document >= longest), -1)


def _offset(inputs: Inputs, q: Tensor, kv: Tensor, causal: bool) -> int | None:
    """Return the number of keys before the first query, or None if tokens are not known to be in order."""
    q_len, kv_len = inputs.shape[2:]
    q_start, kv_start = inputs.starts
    if q_start is not None and kv_start is not None:
        return q_start - kv_start
    if not (causal and q_len <= kv_len and is_readable(q, kv)):
        return None
    # Check that the queries have the positions of the last keys, and that positions increase, apart from padding.
    is_end = torch.equal(*torch.broadcast_tensors(q, kv[:, kv_len - q_len :]))
    is_in_order = bool(((kv[:, 1:] > kv.cummax(1).values[:, :-1]) | (kv[:, 1:] < 0)).all())
    return kv_len - q_len if is_end and is_in_order else None
