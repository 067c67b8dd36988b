"""The rules that bool tensors are written out from: looked for once, and kept as long as nobody writes into them."""

from __future__ import annotations

import itertools
import math
from types import SimpleNamespace
from typing import NamedTuple, cast

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils.weak import WeakTensorKeyDictionary

from saccade.masks.mask import Mask
from saccade.masks.rules.dense import Dense
from saccade.masks.rules.key_ranges import KeyRanges
from saccade.plan.key_ranges import Ints
from saccade.support.torch_modes import is_plain

__all__ = ["found"]

_FEWEST = 1 << 20  # pairs of a product, over batch and heads, below which a look takes longer than it saves
_MOST_RANGES = 16  # of a row: with more of them its bits are smaller
_SAMPLE = 16  # rows that are looked at before all are
_AT_ONCE = 1 << 22  # entries: 4 MB
_MOST_VIEWS = 8  # of one tensor that are kept

Seen = npt.NDArray[np.bool_]


def found(rule: Mask, shape: tuple[int, int, int, int], origin: tuple[int, int], *, is_kept: bool = True) -> Mask:
    """The same rule with what its bool tensors say in place of them, where that is a rule, or a few ranges a row.

    Args:
        rule: any mask.
        shape: (batch, heads, q_len, kv_len) of the product that it is for.
        origin: positions of the first query and the first key.
        is_kept: whether what is found may be kept for the next call. Compilers write into memory that they use again,
            and count nothing.

    Cost: the tensors are read once, at the speed of memory; not again until torch counts a change, unless what counts
        is not there: in inference mode, where memory is shared with NumPy or another process, in distributed programs.
    """
    if math.prod(shape) < _FEWEST:
        return rule

    def instead(atom: Mask) -> Mask:
        if not (isinstance(atom, Dense) and _fits(atom, shape, origin)):
            return atom
        said = _said_by(atom.allowed, is_kept=is_kept)
        return atom if said is None else said

    return rule.with_atoms(instead)


def _fits(mask: Dense, shape: tuple[int, int, int, int], origin: tuple[int, int]) -> bool:
    """Whether a product has just the rows and columns of a tensor, outside of which it hides everything."""
    _, _, rows, columns = mask.allowed.shape
    return columns == shape[3] and origin[1] == 0 and (rows == 1 or (rows, columns - rows) == (shape[2], origin[0]))


class _Known(NamedTuple):
    """What a tensor's views say, and its memory and how often that had been written into when they were looked at."""

    memory: StorageWeakRef
    version: int
    said: dict[tuple[int, torch.Size, tuple[int, ...]], Mask | None]


_known = WeakTensorKeyDictionary()


def _said_by(allowed: Tensor, *, is_kept: bool) -> Mask | None:
    """What is found in a tensor, by a look or from an earlier one at the same memory."""
    if not is_plain(allowed) or not allowed.is_cpu:
        return None
    owner = allowed if allowed._base is None else allowed._base  # views share its count of changes
    if not (is_kept and _is_counted(owner)):
        return _look(allowed)
    memory, version = StorageWeakRef(owner.untyped_storage()), owner._version
    known = cast("_Known | None", _known.get(owner))
    if known is None or known.version != version or known.memory != memory:
        known = _Known(memory, version, {})
    view = (allowed.data_ptr(), allowed.shape, allowed.stride())
    if view not in known.said:
        others = known.said if len(known.said) < _MOST_VIEWS else {}
        # Replaced, never changed: several threads may look at once.
        known = _known[owner] = known._replace(said={**others, view: _look(allowed)})
    return known.said[view]


def _is_counted(owner: Tensor) -> bool:
    """Whether torch counts what is written into a tensor, and nobody else writes there; collectives are not counted."""
    if owner.is_inference() or owner.is_shared() or not owner.untyped_storage().resizable():
        return False
    return not (torch.distributed.is_available() and torch.distributed.is_initialized())


def _look(allowed: Tensor) -> Mask | None:
    """The rule of a tensor ``[batch, heads, q, kv]``; None if its heads differ, or a row has too many ranges."""
    if 0 in allowed.shape:
        return None
    for axis in range(3):
        if allowed.stride(axis) == 0:  # expanded: alike all along
            allowed = allowed.narrow(axis, 0, 1)
    table = _ranges_of(allowed)
    if table is None or (table != table[:, :, :1]).any():
        return None
    table = table[:, :, 0]
    # One item, and one row, where all are alike.
    table = table[:, :1] if (table == table[:, :1]).all() else table
    table = table[:, :, :1] if (table == table[:, :, :1]).all() else table
    starts, ends = np.ascontiguousarray(table)
    from saccade.masks.convert.patterns import RowRanges, describe_ranges  # noqa: PLC0415  knows masks that a product need not

    rule = describe_ranges(RowRanges(starts[..., 0], ends[..., 0], allowed.shape[3])) if starts.shape[2] == 1 else None
    return KeyRanges(starts, ends, allowed.shape[3]) if rule is None else rule


def _ranges_of(allowed: Tensor) -> Ints | None:
    """Starts and ends of the ranges, int64 ``[2, batch, heads, q, ranges]``, as in `KeyRanges`; None if too many."""
    batch, heads, rows, columns = allowed.shape
    items, seen = batch * heads, _memory_of(allowed).reshape(batch * heads, rows, columns)
    if _turns(seen[:, np.linspace(0, rows - 1, min(rows, _SAMPLE), dtype=np.int64)]) is None:
        return None
    together, height = max(1, _AT_ONCE // (rows * columns)), max(1, _AT_ONCE // columns)
    found = []
    for item, first in itertools.product(range(0, items, together), range(0, rows, height)):
        turns = _turns(seen[item : item + together, first : first + height])
        if turns is None:
            return None
        found.append((turns[0] + item * rows + first, turns[1]))
    row, column = (np.concatenate(x) for x in zip(*found, strict=True))
    # Every row begins and ends with nothing seen: its turns are start, end, start, end, …
    row, starts, ends = row[::2], column[::2], column[1::2]
    number = np.arange(len(row)) - np.searchsorted(row, row)
    table = np.zeros((2, items * rows, int(number.max(initial=0)) + 1), dtype=np.int64)
    table[0] = columns
    table[:, row, number] = starts, ends
    return table.reshape(2, batch, heads, rows, -1)


def _memory_of(allowed: Tensor) -> Seen:
    """A tensor as an array. `Tensor.numpy` marks its memory as shared with NumPy for good: see `_is_counted`."""
    where = {"data": (allowed.data_ptr(), True), "shape": tuple(allowed.shape), "strides": allowed.stride()}
    return np.asarray(SimpleNamespace(__array_interface__={"version": 3, "typestr": "|b1", **where}))


def _turns(seen: Seen) -> tuple[Ints, Ints] | None:
    """Rows and columns where keys begin or cease to be seen; None if they do so too often in a row."""
    columns = seen.shape[2]
    bits = np.zeros((seen.shape[0] * seen.shape[1], columns // 8 + 1), dtype=np.uint8)
    bits[:, : -(-columns // 8)] = np.packbits(seen, axis=2, bitorder="little").reshape(len(bits), -1)
    turned = np.left_shift(bits, 1, dtype=np.uint8)
    turned[:, 1:] |= bits[:, :-1] >> 7
    turned ^= bits
    place = np.flatnonzero(turned != 0)  # of bools: zeros among them are passed over eight at a time
    which, bit = np.nonzero(np.unpackbits(turned.ravel()[place][:, None], axis=1, bitorder="little"))
    row, byte = np.divmod(place[which], turned.shape[1])
    if (row[2 * _MOST_RANGES :] == row[: -2 * _MOST_RANGES]).any():
        return None
    return row, 8 * byte + bit
