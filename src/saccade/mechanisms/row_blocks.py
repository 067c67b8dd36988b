"""Complete rows of a matrix, about a megabyte at a time."""

from __future__ import annotations

from collections.abc import Iterator

__all__ = ["row_blocks"]

_ENTRIES = 1 << 18  # about a megabyte of weights, which stays in a core's L2 cache


def row_blocks(
    shape: tuple[int, int, int, int], batch: int | None, head: int | None, rows: range | None
) -> Iterator[tuple[slice, slice, range]]:
    """Batch items, heads and rows of each block: everything if that is little, else some rows of one head.

    Args:
        shape: (batch, heads, q_len, kv_len).
        batch, head, rows: what is asked for, as in ``Matrix.blocks``.
    """
    items = range(shape[0]) if batch is None else range(batch, batch + 1)
    heads = range(shape[1]) if head is None else range(head, head + 1)
    rows = range(shape[2]) if rows is None else rows
    if not (items and heads and rows and shape[3]):
        return
    if len(items) * len(heads) * len(rows) * shape[3] <= _ENTRIES:
        yield slice(items.start, items.stop), slice(heads.start, heads.stop), rows
        return
    height = max(1, _ENTRIES // shape[3])
    for b in items:
        for h in heads:
            for start in range(rows.start, rows.stop, height):
                yield slice(b, b + 1), slice(h, h + 1), range(start, min(start + height, rows.stop))
