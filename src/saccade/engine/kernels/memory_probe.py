"""Memory of rules and biases per pair, measured by running them on a few pairs of a tile."""

from __future__ import annotations

import math
from collections.abc import Callable, Hashable

import torch
from torch import Tensor

from saccade.engine.inputs import AttentionInputs
from saccade.engine.memory_accounting import Held, counted
from saccade.plan import ColumnRange, Plan, Tile

_SIDE, _ENTRIES = 256, 1 << 18  # rows and columns of what is run, and its pairs over batch and heads
_SHARES = 8  # tiles are taken for alike whose unsure columns are the same share of all, to such a part


class Probe:
    """Counts on a small part of a tile what something would hold for the whole of it.

    Queries and keys are stood in for by zeros that take no memory.

    Args:
        inputs: the ingredients in question.
        is_narrow: queries and keys that are multiplied may be one number wide, since they are few beside their pairs.
    """

    def __init__(self, inputs: AttentionInputs, *, is_narrow: bool = False):
        self._given = _stand_in(inputs, 1 if is_narrow and inputs.tile_function is None else None)
        self._found: dict[Hashable, tuple[float, float]] = {}

    def held(self, name: str, tile: Tile, run: Callable[[AttentionInputs, Tile], object]) -> Held:
        """Return the bytes that ``run`` holds for a tile, assumed to grow with its pairs; each name is run once."""
        if tile.height * tile.width == 0:
            return Held(0, 0)
        copies = (tile.batch.stop - tile.batch.start, tile.heads.stop - tile.heads.start)
        key = (name, id(tile.rule), copies, min(tile.height, _SIDE), _kind(tile))
        if key not in self._found:
            part = _part(tile, math.prod(copies))
            inputs = self._given.replaced(
                plan=Plan(self._given.shape, ())
            )  # what is kept with the plan is for whole tiles
            with torch.no_grad():
                found = counted(lambda: run(inputs, part))
            pairs = part.height * part.width
            self._found[key] = found.most / pairs, found.left / pairs
        most, left = (int(each * tile.height * tile.width) for each in self._found[key])
        return Held(most, left)


def _stand_in(inputs: AttentionInputs, width: int | None) -> AttentionInputs:
    """Return the score matrix with zeros as inputs, on the CPU if the true ones have no memory."""

    def zeros(x: Tensor, width: int | None = None) -> Tensor:
        shape = x.shape if width is None else (*x.shape[:-1], width)
        return torch.zeros((), dtype=x.dtype, device="cpu" if x.is_meta else x.device).expand(shape)

    bias = inputs.bias
    return inputs.replaced(
        query=zeros(inputs.query, width),
        key=zeros(inputs.key, width),
        parameters=tuple(zeros(x) for x in inputs.parameters),
        bias=bias.of(zeros(bias.source)) if bias is not None and bias.source.is_meta else bias,
    )


def _kind(tile: Tile) -> Hashable:
    """Alike for tiles that hold about the same per pair: what matters is the share of what is asked, and the steps."""
    unsure = [len(strip.keys) for strip in tile.columns if strip.partial is not True]
    shares = (-(-_SHARES * size // tile.width) for size in (sum(unsure), max(unsure, default=0)))
    return (tile.rows.step, tile.columns[0].keys.step, min(len(tile.columns), 2), *shares)


def _part(tile: Tile, copies: int) -> Tile:
    """Return some rows of a tile, and of each column range its share of columns."""
    side = max(16, min(_SIDE, math.isqrt(_ENTRIES // copies)))
    share = min(1.0, side / tile.width)
    columns = tuple(
        ColumnRange(
            strip.keys[: math.ceil(share * len(strip.keys))], strip.partial if strip.partial is True else "some"
        )
        for strip in tile.columns
    )
    return tile._replace(rows=tile.rows[:side], columns=columns)
