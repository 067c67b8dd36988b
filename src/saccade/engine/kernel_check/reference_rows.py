"""A few complete rows of a product by the definition: outputs, gradients, and how far rounding could move each."""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import NamedTuple

import torch
from torch import Tensor

from saccade.engine.inputs import AttentionInputs
from saccade.engine.tiles.grouped_heads import product
from saccade.engine.tiles.tile_scores import allowed, normalised, visible_scores
from saccade.plan import ColumnRange, Tile
from saccade.support.numerics import widest_dtype

_BLOCK, _RANDOM, _CUTS = 128, 4, 4  # rows that kernels take at once; rows at random, and at edges of tiles


class Pick(NamedTuple):
    """Rows of one head of one batch item."""

    item: int
    head: int
    group: int
    rows: list[int]


def picks_of(inputs: AttentionInputs) -> Iterator[Pick]:
    """Rows at which kernels tend to err, and some at random, of a few heads."""
    batch, heads, q_len, _ = inputs.shape
    drawn = torch.Generator().manual_seed(0)
    rows = {0, q_len - 1, _BLOCK - 1, _BLOCK, (q_len - 1) // _BLOCK * _BLOCK - 1, (q_len - 1) // _BLOCK * _BLOCK}
    rows |= set(torch.randint(q_len, (_RANDOM,), generator=drawn).tolist())
    tiles = inputs.row_plan.tiles
    starts = [tile.rows.start for _, tile in zip(range(4 * _CUTS), tiles)]  # noqa: B905  the first of many
    rows |= {row + side for row in starts[:: max(1, len(starts) // _CUTS)] for side in (-1, 0)}
    inside = sorted(row for row in rows if 0 <= row < q_len)
    share = heads // inputs.key.shape[1]
    # A kernel that mistakes one group for another is right about the first head and the last.
    chosen = {(0, 0), (0, 1 % heads), (0, share % heads), (batch - 1, heads - 1)}
    chosen.add((int(torch.randint(batch, (), generator=drawn)), int(torch.randint(heads, (), generator=drawn))))
    for item, head in sorted(chosen):
        yield Pick(item, head, head // share, inside)


class Truth(NamedTuple):
    """The rows of a pick by the definition, what rounding could move of each number, and gradients from them alone."""

    out: Tensor
    lse: Tensor
    size_of_out: Tensor
    grads: tuple[Tensor | None, ...]
    sizes: tuple[Tensor, ...]
    size_of_scores: float


def truth_of(
    inputs: AttentionInputs, value: Tensor, pick: Pick, of_rows: Tensor, of_lse: Tensor, *, gradients: bool
) -> Truth:
    """Compute the rows of a pick by the definition, in float64 where the device has it.

    Args:
        inputs, value: of the product.
        pick: which rows.
        of_rows, of_lse: gradients of their outputs ``[rows, value_dim]`` and lse ``[rows]``.
        gradients: whether to go back from them.
    """
    wide = widest_dtype(inputs.device)
    own = inputs.replaced(dtype=wide)
    q = inputs.query[pick.item, pick.head, pick.rows].to(wide)
    k, v = (x[pick.item, pick.group].to(wide) for x in (inputs.key, value))
    leaves = [x.detach().requires_grad_(gradients) for x in (q, k, v)]
    bias = [] if inputs.bias is None else [inputs.bias.source]
    others = [x.detach().requires_grad_(x.requires_grad) for x in bias]
    others += [x.detach().to(wide).requires_grad_(x.requires_grad) for x in inputs.parameters]
    own = own.replaced(
        bias=None if inputs.bias is None else inputs.bias.of(others[0]), parameters=tuple(others[len(bias) :])
    )
    with torch.set_grad_enabled(gradients):
        parts = [_row(own, leaves, pick, number) for number in range(len(pick.rows))]
        out, lse, weights = (torch.stack([part[i] for part in parts]) for i in range(3))
    p, g = weights.detach(), of_rows.to(wide)
    seen = (lse.detach() > -math.inf).to(wide)
    size_of_out = ((p.square() @ v.square()).sqrt() + out.abs()).detach()
    grads: tuple[Tensor | None, ...] = ()
    sizes: tuple[Tensor, ...] = ()
    size_of_scores = 0.0
    if gradients:
        asked = [*leaves, *(x for x in others if x.requires_grad)]
        target = (out * g).sum() + (lse.masked_fill(seen == 0, 0.0) * of_lse.to(wide) * seen).sum()
        grads = torch.autograd.grad(target, asked, allow_unused=True)
        with torch.no_grad():
            taken = (out * g).sum(-1).abs() + of_lse.to(wide).abs()
            moved = (p * ((g @ v.T).abs() + taken[:, None])).square()
            scale = inputs.scale**2
            of_q, of_k = (moved @ k.square() * scale).sqrt(), (moved.T @ q.square() * scale).sqrt()
            sizes = (of_q, of_k, (p.square().T @ g.square()).sqrt())
            size_of_scores = float(moved.sum().sqrt())
    return Truth(out.detach(), lse.detach(), size_of_out, grads, sizes, size_of_scores)


def _row(inputs: AttentionInputs, leaves: list[Tensor], pick: Pick, number: int) -> tuple[Tensor, Tensor, Tensor]:
    """Output, lse and weights of one complete row."""
    q, k, v = (x[None, None] for x in (leaves[0][number : number + 1], *leaves[1:]))
    row, kv_len = pick.rows[number], inputs.shape[3]
    one = (slice(pick.item, pick.item + 1), slice(pick.head, pick.head + 1))
    tile = Tile(*one, range(row, row + 1), (ColumnRange(range(kv_len), ("row", row)),), inputs.rule)
    scores = visible_scores(inputs, q, k, None if inputs.bias is None else inputs.bias.read(tile), tile)
    seen = allowed(inputs, tile)
    scores = scores if seen is None else scores.masked_fill(~seen, -math.inf)
    weights, lse = normalised(scores)
    return product(weights, v)[0, 0, 0], lse[0, 0, 0], weights[0, 0, 0]
