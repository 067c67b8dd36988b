"""Attention for caches in which each key head reads its own columns."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from saccade.caches.call_arguments import Call
from saccade.matrix import Matrix
from saccade.positions.token_positions import GivenPositions, Positions


def attend_by_head(
    call: Call,
    kv_heads: int,
    read: Callable[[slice], tuple[Tensor, Tensor]],
    positions: Callable[[slice], Tensor] | None,
    finish: Callable[[Matrix, Tensor], tuple[Tensor, ...]],
    *,
    portions: Sequence[slice] = (),
    sees_all: bool = False,
) -> tuple[Tensor, ...]:
    """Run attention in which each key head reads its own columns of the cache, and concatenate the heads' results.

    The key heads of all items are rows of one table, with index ``item * kv_heads + head``. If the mechanism and mask
    are the same for all heads, many rows run at once, as batch items. Otherwise, all heads run in one call if they
    store the same tokens. If they do not, there is one call for each key head: it gives that head's keys to all query
    heads, and only the results of the query heads that share the key head are used.

    Args:
        call: the cache call.
        kv_heads: number of key heads of each item.
        read: returns the keys and values for a slice of rows, ``[rows, columns, width]`` each.
        positions: returns the positions of these keys, int64 ``[rows, columns]``, -1 for masked keys. None if all heads
            store the same tokens, at the call's ``kv_positions``.
        finish: computes results ``[batch, heads, ...]`` from an attention matrix and the values.
        portions: slices of rows to run at once, in order; all rows when empty.
        sees_all: whether all columns that are read are visible to every query.
    """
    batch, heads, q_len, width = call.query.shape
    rows, group = batch * kv_heads, heads // kv_heads
    parts: list[tuple[Tensor, ...]] = []
    if call.treats_heads_alike and not call.differs_between_heads:
        folded = call.query.reshape(rows, group, q_len, width)
        q_rows = _positions_by_row(call.positions, batch, kv_heads)
        kv_rows = _positions_by_row(call.kv_positions, batch, kv_heads) if positions is None else positions
        for part in portions or [slice(0, rows)]:
            k, v = (x[:, None] for x in read(part))
            if sees_all:
                matrix = call.mechanism(folded[part], k, mask=None, q_positions=None, kv_positions=None)
            else:
                where = {"q_positions": q_rows(part), "kv_positions": kv_rows(part)}
                matrix = call.mechanism(folded[part], k, mask=call.mask, **where)
            parts.append(finish(matrix, v))
        return tuple(torch.cat(x).reshape(batch, heads, *x[0].shape[2:]) for x in zip(*parts, strict=True))
    if positions is None:
        k, v = (x.unflatten(0, (batch, kv_heads)) for x in read(slice(0, rows)))
        where = {"q_positions": call.positions, "kv_positions": call.kv_positions}
        return finish(call.mechanism(call.query, k, mask=call.mask, **where), v)
    for head in range(kv_heads):
        part = slice(head, rows, kv_heads)
        k, v = (x[:, None].expand(-1, kv_heads, -1, -1) for x in read(part))
        matrix = call.mechanism(call.query, k, mask=call.mask, q_positions=call.positions, kv_positions=positions(part))
        parts.append(tuple(x[:, head * group : (head + 1) * group] for x in finish(matrix, v)))
    return tuple(torch.cat(x, 1) for x in zip(*parts, strict=True))


def _positions_by_row(where: Positions, batch: int, kv_heads: int) -> Callable[[slice], GivenPositions]:
    """Return a function that maps (item, head) rows to positions. All heads of an item have the same positions."""
    if where.run is not None:
        return lambda part: where
    table = where.on().expand(batch, -1).repeat_interleave(kv_heads, 0)
    return lambda part: table[part]
