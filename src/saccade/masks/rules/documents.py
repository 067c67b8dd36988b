"""Documents: a mask that separates several documents packed into one sequence."""

from __future__ import annotations

import dataclasses
from bisect import bisect_right
from collections.abc import Hashable, Iterable, Sequence
from types import NoneType
from typing import Any, ClassVar

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from saccade.masks.algebra import And
from saccade.masks.convert.deferred_masks import Converted
from saccade.masks.mask import Domain, Mask
from saccade.masks.mask_fields import Table, ints_of, items_of
from saccade.masks.rules.full import Full
from saccade.plan import ALL, Box, Groups
from saccade.plan.key_ranges import Bounds, Ints, KeyDomain, Spans
from saccade.positions.token_positions import GivenPositions, Positions
from saccade.support.argument_hints import argument_hints
from saccade.support.errors import shown, value_error
from saccade.support.torch_modes import is_tracing
from saccade.support.validation import check_type

_TOTAL_BITS = 31  # 16 bytes for each position: 32 GB


@argument_hints(lengths="Documents([3, 5]): tokens in each document; from_cu_seqlens takes cumulative lengths")
@dataclasses.dataclass(frozen=True)
class Documents(Mask):
    """A mask of packed documents: tokens attend only within their own document, as ``rule`` allows.

    Positions in ``rule`` count from the start of each document, so that packed, padded and separate sequences give
    equal results. Write ``Documents(lengths, rule=Causal() & ...)``, since a mask joined with ``&`` counts positions
    from the start of the full sequence.

    >>> print(Documents([2, 3]).picture(5))
    1 1 . . .
    1 1 . . .
    . . 1 1 1
    . . 1 1 1
    . . 1 1 1
    >>> from saccade.masks import Causal
    >>> print(Documents([2, 2], rule=Causal()).picture(4))
    1 . . .
    1 1 . .
    . . 1 .
    . . 1 1

    Args:
        lengths: lengths of the documents, in order, for all batch items; or a list of lengths per batch item. Positions
            after the documents of a shorter item belong to no document: they attend to nothing and are never visible.
            Attention over positions after the longest item raises an error.
        rule: the mask within each document; full attention when None.

    Raises:
        ValueError: lengths are negative, not integers or missing, or their sum is 2**31 or more (a table has an entry
            for each position).
        TypeError: the lengths are not a list, or the rule is not a mask.
    """

    lengths: tuple[tuple[int, ...], ...]
    rule: Mask | None
    # Derived from the lengths; not part of the value of the mask.
    _places: ClassVar[Table]
    _documents: ClassVar[tuple[tuple[Ints, Ints], ...]]
    is_fact_of_batch = True

    def __init__(self, lengths: Sequence[int] | Sequence[Sequence[int]] | Tensor, rule: Mask | None = None):
        items = lengths_per_item(lengths)
        check_type("rule", rule, (Mask, NoneType), "be a mask or None")
        if rule is not None and rule.shape[0] not in (1, len(items)) and len(items) != 1:
            expected = f"be for 1 or {len(items)} batch items"
            raise value_error("rule", expected, rule.shape[0])
        object.__setattr__(self, "lengths", items)
        object.__setattr__(self, "rule", rule)
        object.__setattr__(self, "_places", Table(_document_table(items)))
        object.__setattr__(self, "_documents", tuple(_lengths_and_ends(item) for item in items))

    @property
    def shape(self) -> tuple[int, int]:
        batch, heads = self._inside.shape
        return (max(batch, len(self.lengths)), heads)

    @property
    def _inside(self) -> Mask:
        """Mask within each document, with positions counted from the start of the document."""
        return Full() if self.rule is None else self.rule

    @property
    def made_of(self) -> tuple[Mask, ...]:
        return (self._inside,)

    @property
    def is_causal(self) -> bool:
        return self._inside.is_causal

    @property
    def domain(self) -> Domain:
        longest = max(map(sum, self.lengths))
        return Domain(*(range(min(longest, self._first_outside(inside))) for inside in self._inside.domain))

    def allows(self, b: Tensor, h: Tensor, q: Tensor, kv: Tensor) -> Tensor:
        item = b if len(self.lengths) > 1 else 0
        document, start = self._places.on(q.device).unbind(0)
        last = document.shape[1] - 1
        # The first entry of the table is for positions before all documents, the last entry for positions after them.
        row, column = ((x + 1).clamp(0, last) for x in (q, kv))
        number = document[item, row]
        together = (number == document[item, column]) & (number >= 0)
        if self.rule is None:
            return together
        return together & self.rule.allows(b, h, q - start[item, row], kv - start[item, column])

    def _first_outside(self, inside: range | None) -> int:
        """Return the first position in the packed row whose offset within its document is outside of ``inside``."""
        if inside is None:
            return 1 << _TOTAL_BITS
        # A document longer than `inside` ends outside it; if `inside` starts after 0, every document starts outside it.
        within = inside.stop if inside.start <= 0 else 0
        firsts = [(ends - lengths)[lengths > within] + within for lengths, ends in self._documents]
        return min((int(first.min()) for first in firsts if len(first)), default=1 << _TOTAL_BITS)

    def places(self, positions: Tensor) -> Tensor:
        """Convert positions in the packed row to positions within their document; -1 for positions in no document.

        Args:
            positions: int64 ``[batch | 1, len]``, counted from the start of the packed row.
        """
        document, start = self._places.on(positions.device).unbind(0)
        item = torch.arange(max(len(positions), len(self.lengths)), device=positions.device)[:, None]
        item, row = item % len(self.lengths), (positions + 1).clamp(0, document.shape[1] - 1)
        row = row.expand(len(item), -1)
        return (row - 1 - start[item, row]).masked_fill(document[item, row] < 0, -1)

    @property
    def table(self) -> Tensor:
        """Document index of each position and start of that document, int64 ``[2, items, longest + 2]``, on the CPU.

        The first entry is for positions before all documents, the last entry for positions after them.
        """
        return self._places.on(torch.device("cpu"))

    def bounds(self, groups: Groups, keys: KeyDomain) -> Bounds:
        if len(self.lengths) > 1 and (groups.batch == ALL).any():
            return Bounds.unknown(keys)
        start, stop, is_single = self._spans(groups)
        inside = Spans.within(keys, start, stop)
        spanning = Bounds(inside, Spans.nothing(keys))
        if self.rule is None:
            return Bounds.exactly(inside).where(is_single, spanning)
        first = np.clip(keys.first - start, 0, stop - start)
        local = KeyDomain(first, np.maximum(first, np.minimum(keys.stop, stop) - start))
        shifted = groups._replace(first=groups.first - start, last=groups.last - start)
        inner = self.rule.bounds(shifted, local)
        within = Bounds(inner.any_row.shifted(start, keys), inner.all_rows.shifted(start, keys))
        return within.where(is_single, spanning)

    def partial(self, box: Box) -> bool | Hashable:
        if len(self.lengths) > 1 and box.batch == ALL:
            return (self, box)
        item = 0 if len(self.lengths) == 1 else box.batch
        (row_start, row_stop, is_single), (start, stop, other) = (self._span_of(item, x) for x in (box.rows, box.keys))
        if row_start >= stop or start >= row_stop:
            return False
        if not (is_single and other and start == row_start):
            return (self, box)
        rows, keys = (range(x.start - start, x.stop - start, x.step) for x in (box.rows, box.keys))
        return self._inside.partial(Box(box.batch, rows, keys))

    def terms(self) -> Sequence[tuple[int, Mask]]:
        terms = self._inside.terms()
        if all(step == 1 for step, _ in terms):
            return [(1, self)]
        return [(step, Documents(self.lengths, term)) for step, term in terms]

    def cuts(self, batch: int, rows: range) -> Ints:
        items = self._documents if batch == ALL else [self._documents[0 if len(self._documents) == 1 else batch]]
        edges = []
        for lengths, ends in items:
            edges += [ends - lengths, ends]
            if self.rule is not None and len(lengths):
                inner = self.rule.cuts(batch, range(int(lengths.max())))
                inside = (inner > 0) & (inner < lengths[:, None])
                edges.append(
                    (ends - lengths)[:, None].repeat(len(inner), 1)[inside]
                    + np.broadcast_to(inner, inside.shape)[inside]
                )
        return np.concatenate(edges)

    def _span_of(self, item: int, span: range) -> tuple[int, int, bool]:
        """Return the result of `_spans` for a single range of positions in one batch item, computed faster."""
        lengths, ends = self._documents[item]
        total = int(ends[-1]) if len(ends) else 0
        if not total or span[0] >= total or span[-1] < 0:
            return 0, 0, False
        low, high = bisect_right(ends, max(span[0], 0)), bisect_right(ends, min(span[-1], total - 1))
        return int(ends[low] - lengths[low]), int(ends[high]), low == high and span[0] >= 0 and span[-1] < total

    def _spans(self, groups: Groups) -> tuple[Ints, Ints, npt.NDArray[np.bool_]]:
        """Return the start and end of the documents that each row group touches, and whether it is in one document."""
        start, stop = np.zeros_like(groups.first), np.zeros_like(groups.first)
        is_single = np.zeros(groups.first.shape, dtype=bool)
        items = np.zeros_like(groups.batch) if len(self.lengths) == 1 else groups.batch
        for item in np.unique(items).tolist():
            chosen = items == item
            lengths, ends = self._documents[item]
            total = int(ends[-1]) if len(ends) else 0
            first, last = groups.first[chosen], groups.last[chosen]
            touches = (first < total) & (last >= 0)
            if not total:
                continue
            low = np.searchsorted(ends, np.clip(first, 0, total - 1), side="right")
            high = np.searchsorted(ends, np.clip(last, 0, total - 1), side="right")
            start[chosen] = np.where(touches, ends[low] - lengths[low], 0)
            stop[chosen] = np.where(touches, ends[high], 0)
            is_single[chosen] = (low == high) & (first >= 0) & (last < total)
        return start, stop, is_single


def documents_of_table(table: Tensor, rule: Mask | None) -> Documents:
    """Return the documents mask for a table like `Documents.table`, without empty documents."""
    lengths = [row[row >= 0].unique_consecutive(return_counts=True)[1].tolist() for row in table[0]]
    return Documents(lengths, rule)


def joined_with_batch_mask(pattern: Mask, batch_mask: Mask) -> Mask:
    """Join the pattern of a layer with the mask of a batch, so that the pattern restarts in each packed document."""
    parts = batch_mask.parts if isinstance(batch_mask, And) else (batch_mask,)
    index = next((i for i, part in enumerate(parts) if _separates_documents(part)), None)
    if index is None:
        return pattern & batch_mask
    documents = parts[index]
    joined: Mask
    if isinstance(documents, Documents) and is_tracing():  # reading the lengths would fix them in the program
        joined = Converted("Documents", documents.table, documents.rule).within(pattern)
    elif isinstance(documents, Documents):
        joined = Documents(documents.lengths, pattern if documents.rule is None else pattern & documents.rule)
    else:
        assert isinstance(documents, Converted)  # for the type checker
        joined = documents.within(pattern)
    return joined if len(parts) == 1 else And((*parts[:index], joined, *parts[index + 1 :]))


def positions_in_documents(positions: GivenPositions, mask: object) -> range | Tensor:
    """Return the positions of tokens, counted from 0 in each document if the mask separates packed documents.

    Learned position embeddings and temperatures need these positions. Masks and relative positions do not, because they
    count over the full sequence or distinguish documents.
    """
    resolved = Positions.of(positions)
    for part in mask.parts if isinstance(mask, And) else (mask,):
        if isinstance(part, Documents):
            return part.places(resolved.on())
    return resolved.given


def _separates_documents(mask: Mask) -> bool:
    return isinstance(mask, Documents) or (isinstance(mask, Converted) and mask.separates_documents)


def lengths_per_item(lengths: object, name: str = "lengths") -> tuple[tuple[int, ...], ...]:
    """Validate document lengths, or other numbers per document, and return them per batch item.

    The numbers of a single item apply to the whole batch.
    """
    hint = f"pass one list of {name} for all batch items, or one list per item"
    values = items_of(name, lengths, "be ints of at least 0", hint=hint)
    if not values:
        raise value_error(name, "not be empty", "none", hint=hint)
    rows = values if isinstance(values[0], Iterable) else [values]
    items = tuple(ints_of(name, row, hint=hint) for row in rows)
    if any(sum(item) >> _TOTAL_BITS for item in items):
        raise value_error(name, f"add up to less than 2**{_TOTAL_BITS}", shown(rows))
    return items


def _lengths_and_ends(item: tuple[int, ...]) -> tuple[Ints, Ints]:
    """Return the lengths and the ends of the non-empty documents of a batch item."""
    lengths = np.asarray([length for length in item if length], dtype=np.int64)
    return lengths, np.cumsum(lengths)


def _document_table(lengths: tuple[tuple[int, ...], ...]) -> np.ndarray[Any, Any]:
    """Return each position's document (-1 if none) and the start of that document; see `Documents.table`."""
    longest = max(sum(item) for item in lengths)
    table = np.full((2, len(lengths), longest + 2), -1, dtype=np.int64)
    table[1] = 0
    for number, item in enumerate(lengths):
        sizes = np.asarray(item, dtype=np.int64)
        inside = table[:, number, 1 : 1 + int(sizes.sum())]
        inside[0] = np.repeat(np.arange(len(sizes)), sizes)
        inside[1] = np.repeat(np.cumsum(sizes) - sizes, sizes)
    return table
