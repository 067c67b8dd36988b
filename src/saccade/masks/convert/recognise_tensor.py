"""Recognise patterns in bool mask tensors. A tensor is read once, and again only after it has been modified."""

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

_MIN_PAIRS = 1 << 20  # with fewer query-key pairs, reading a tensor takes longer than it saves
_MAX_RANGES = 16  # with more ranges per row, the bool tensor takes less memory
_SAMPLE = 16  # rows that are read first, as a sample
_CHUNK = 1 << 22  # entries: 4 MB
_MAX_VIEWS = 8  # cached views of one tensor

Bools = npt.NDArray[np.bool_]


def recognise_tensors(
    mask: Mask, shape: tuple[int, int, int, int], origin: tuple[int, int], *, may_cache: bool = True
) -> Mask:
    """Replace each bool tensor in ``mask`` by an equal pattern, or by a few key ranges per row.

    Args:
        mask: any mask.
        shape: (batch, heads, q_len, kv_len) of the attention.
        origin: positions of the first query and the first key.
        may_cache: whether patterns may be cached for the next call; False in compiled programs, which reuse memory
            without counting writes.

    Cost: each tensor is read once, at memory speed, and again after torch has counted a write to it. It is read in
        every call if writes are not counted: in inference mode, for memory shared with NumPy or another process, and
        in distributed programs.
    """
    if math.prod(shape) < _MIN_PAIRS:
        return mask

    def recognise(atom: Mask) -> Mask:
        if not (isinstance(atom, Dense) and _fits(atom, shape, origin)):
            return atom
        pattern = _cached_pattern(atom.allowed, may_cache=may_cache)
        return atom if pattern is None else pattern

    return mask.with_atoms(recognise)


def _fits(mask: Dense, shape: tuple[int, int, int, int], origin: tuple[int, int]) -> bool:
    """Return whether a mask tensor covers exactly the pairs of the attention; pairs outside the tensor are masked."""
    _, _, rows, columns = mask.allowed.shape
    return columns == shape[3] and origin[1] == 0 and (rows == 1 or (rows, columns - rows) == (shape[2], origin[0]))


class _CachedPatterns(NamedTuple):
    """The patterns recognised in views of a mask tensor, and the tensor's memory and version when it was read."""

    memory: StorageWeakRef
    version: int
    patterns: dict[tuple[int, torch.Size, tuple[int, ...]], Mask | None]


_cache = WeakTensorKeyDictionary()


def _cached_pattern(allowed: Tensor, *, may_cache: bool) -> Mask | None:
    """Return the pattern of a mask tensor, from the cache if the tensor has not been modified."""
    if not is_plain(allowed) or not allowed.is_cpu:
        return None
    owner = allowed if allowed._base is None else allowed._base  # views share its version counter
    if not (may_cache and _counts_writes(owner)):
        return _recognise(allowed)
    memory, version = StorageWeakRef(owner.untyped_storage()), owner._version
    cached = cast("_CachedPatterns | None", _cache.get(owner))
    if cached is None or cached.version != version or cached.memory != memory:
        cached = _CachedPatterns(memory, version, {})
    view = (allowed.data_ptr(), allowed.shape, allowed.stride())
    if view not in cached.patterns:
        others = cached.patterns if len(cached.patterns) < _MAX_VIEWS else {}
        # Replace the entry instead of changing it: several threads may read at the same time.
        cached = _cache[owner] = cached._replace(patterns={**others, view: _recognise(allowed)})
    return cached.patterns[view]


def _counts_writes(owner: Tensor) -> bool:
    """Return whether torch counts all writes to a mask tensor. It does not count writes by collectives, for example."""
    if owner.is_inference() or owner.is_shared() or not owner.untyped_storage().resizable():
        return False
    return not (torch.distributed.is_available() and torch.distributed.is_initialized())


def _recognise(allowed: Tensor) -> Mask | None:
    """Return the pattern of a mask ``[batch, heads, q, kv]``; None if heads differ or a row has many ranges."""
    if 0 in allowed.shape:
        return None
    for axis in range(3):
        if allowed.stride(axis) == 0:  # an expanded axis
            allowed = allowed.narrow(axis, 0, 1)
    table = _ranges_of(allowed)
    if table is None or (table != table[:, :, :1]).any():
        return None
    table = table[:, :, 0]
    # If all items, or all rows, are equal, keep only the first.
    table = table[:, :1] if (table == table[:, :1]).all() else table
    table = table[:, :, :1] if (table == table[:, :, :1]).all() else table
    starts, ends = np.ascontiguousarray(table)
    from saccade.masks.convert.patterns import RowRanges, describe_ranges  # noqa: PLC0415  imports many masks

    if starts.shape[2] == 1:
        pattern = describe_ranges(RowRanges(starts[..., 0], ends[..., 0], allowed.shape[3]))
        if pattern is not None:
            return pattern
    return KeyRanges(starts, ends, allowed.shape[3])


def _ranges_of(allowed: Tensor) -> Ints | None:
    """Return the visible ranges of a mask tensor, ``[2, batch, heads, q, ranges]``; None if a row has too many."""
    batch, heads, rows, columns = allowed.shape
    items, visible = batch * heads, _as_array(allowed).reshape(batch * heads, rows, columns)
    if _changes(visible[:, np.linspace(0, rows - 1, min(rows, _SAMPLE), dtype=np.int64)]) is None:
        return None
    chunk_items, chunk_rows = max(1, _CHUNK // (rows * columns)), max(1, _CHUNK // columns)
    chunks = []
    for item, first in itertools.product(range(0, items, chunk_items), range(0, rows, chunk_rows)):
        changes = _changes(visible[item : item + chunk_items, first : first + chunk_rows])
        if changes is None:
            return None
        chunks.append((changes[0] + item * rows + first, changes[1]))
    row, column = (np.concatenate(x) for x in zip(*chunks, strict=True))
    # Every row begins and ends with a masked key, so its changes are start, end, start, end, …
    row, starts, ends = row[::2], column[::2], column[1::2]
    number = np.arange(len(row)) - np.searchsorted(row, row)
    table = np.zeros((2, items * rows, int(number.max(initial=0)) + 1), dtype=np.int64)
    table[0] = columns
    table[:, row, number] = starts, ends
    return table.reshape(2, batch, heads, rows, -1)


def _as_array(allowed: Tensor) -> Bools:
    """Convert a mask tensor to an array without `Tensor.numpy`, which marks memory as shared; see `_counts_writes`."""
    memory = {"data": (allowed.data_ptr(), True), "shape": tuple(allowed.shape), "strides": allowed.stride()}
    return np.asarray(SimpleNamespace(__array_interface__={"version": 3, "typestr": "|b1", **memory}))


def _changes(visible: Bools) -> tuple[Ints, Ints] | None:
    """Return the row and column of each start and end of a visible range in a mask tensor; None if too many."""
    columns = visible.shape[2]
    bits = np.zeros((visible.shape[0] * visible.shape[1], columns // 8 + 1), dtype=np.uint8)
    bits[:, : -(-columns // 8)] = np.packbits(visible, axis=2, bitorder="little").reshape(len(bits), -1)
    flips = np.left_shift(bits, 1, dtype=np.uint8)
    flips[:, 1:] |= bits[:, :-1] >> 7
    flips ^= bits
    changed = np.flatnonzero(flips != 0)  # NumPy skips False values eight at a time
    which, bit = np.nonzero(np.unpackbits(flips.ravel()[changed][:, None], axis=1, bitorder="little"))
    row, byte = np.divmod(changed[which], flips.shape[1])
    if (row[2 * _MAX_RANGES :] == row[: -2 * _MAX_RANGES]).any():
        return None
    return row, 8 * byte + bit
