"""Masks as nested loops over Python ints: the tests' own reading of each definition."""

from collections.abc import Callable
from typing import Any

import numpy as np
import torch

from saccade import masks
from saccade.masks.rules.key_ranges import KeyRanges

Rule = Callable[[int, int, int], bool]


def rule(mask: masks.Mask) -> Rule:
    """Return the rule ``(batch item, query position, key position) -> bool``, written without tensors."""
    return _RULES[type(mask)](mask)


def dense(mask: masks.Mask, batch: int, q_len: int, kv_len: int) -> torch.Tensor:
    """Return bool [batch, q_len, kv_len] by loops."""
    allows = rule(mask)
    rows = range(kv_len - q_len, kv_len)
    return torch.tensor(
        [[[allows(b, i, j) for j in range(kv_len)] for i in rows] for b in range(batch)], dtype=torch.bool
    ).reshape(batch, q_len, kv_len)


def _window(mask: masks.Window) -> Rule:
    return lambda b, i, j: (mask.left is None or j >= i - mask.left) and (mask.right is None or j <= i + mask.right)


def _global(mask: masks.Global) -> Rule:
    return lambda b, i, j: (mask.sees and i in mask.positions) or (mask.seen and j in mask.positions)


def _strided(mask: masks.Strided) -> Rule:
    return lambda b, i, j: (i - j) % mask.step == 0


def _prefix(mask: masks.Prefix) -> Rule:
    return lambda b, i, j: j < mask.length


def _segments(mask: masks.Segments) -> Rule:
    return lambda b, i, j: (i // mask.segment) * mask.segment - mask.memory <= j <= i


def _random(mask: masks.Random) -> Rule:
    """Return the rule of the public draw, which has tests of its own."""

    def allows(b: int, i: int, j: int) -> bool:
        return i >= 0 and j // mask.block_size in mask.drawn(np.asarray([i // mask.block_size]))[0].tolist()

    return allows


def _blocks(mask: masks.Blocks) -> Rule:
    def allows(b: int, i: int, j: int) -> bool:
        row, column = i // mask.block_size, j // mask.block_size
        layout = mask.layout[0]
        return 0 <= row < len(layout) and 0 <= column < len(layout[0]) and layout[row][column]

    return allows


def _coarse(mask: masks.Coarse) -> Rule:
    inner = rule(mask.rule)
    return lambda b, i, j: inner(b, i // mask.block_size, j // mask.block_size)


def _padding(mask: masks.Padding) -> Rule:
    def allows(b: int, i: int, j: int) -> bool:
        length = mask.lengths[b if len(mask.lengths) > 1 else 0]
        return j < length if mask.side == "right" else mask.padded_len - length <= j < mask.padded_len

    return allows


def _per_item(mask: masks.PerItem) -> Rule:
    rules = [rule(own) for own in mask.rules]
    return lambda b, i, j: rules[b if len(rules) > 1 else 0](b, i, j)


def _documents(mask: masks.Documents) -> Rule:
    def place(b: int, position: int) -> tuple[int, int] | None:
        start = 0
        for number, length in enumerate(mask.lengths[b if len(mask.lengths) > 1 else 0]):
            if start <= position < start + length:
                return number, position - start
            start += length
        return None

    inner = (lambda b, i, j: True) if mask.rule is None else rule(mask.rule)

    def allows(b: int, i: int, j: int) -> bool:
        one, other = place(b, i), place(b, j)
        return one is not None and other is not None and one[0] == other[0] and inner(b, one[1], other[1])

    return allows


def _prefix_per_document(mask: masks.PrefixPerDocument) -> Rule:
    def allows(b: int, i: int, j: int) -> bool:
        item, start = (b if len(mask.lengths) > 1 else 0), 0
        for length, prefix in zip(mask.lengths[item], mask.prefixes[item], strict=True):
            if start <= i < start + length:
                return start <= j < start + prefix
            start += length
        return False

    return allows


def _image_bidirectional(mask: masks.ImageBidirectional) -> Rule:
    def allows(b: int, i: int, j: int) -> bool:
        images = mask.groups[b if len(mask.groups) > 1 else 0]
        inside = 0 <= i < len(images) and 0 <= j < len(images)
        return inside and images[i] >= 0 and images[i] == images[j]

    return allows


def _tree(mask: masks.Tree) -> Rule:
    def allows(b: int, i: int, j: int) -> bool:
        parents = mask.parents[b if len(mask.parents) > 1 else 0]
        if not (0 <= i < len(parents) and 0 <= j < len(parents)):
            return False
        while i > j:
            i = parents[i]
        return i == j

    return allows


def _block_diffusion(mask: masks.BlockDiffusion) -> Rule:
    def allows(b: int, i: int, j: int) -> bool:
        if not (0 <= i < 2 * mask.length and 0 <= j < 2 * mask.length):
            return False
        (is_clean, row), (clean_key, column) = divmod(i, mask.length), divmod(j, mask.length)
        row, column = row // mask.block, column // mask.block
        if is_clean:
            return bool(clean_key) and column <= row
        return column < row if clean_key else column == row

    return allows


def _dense(mask: masks.Dense) -> Rule:
    batch, _, rows, columns = mask.allowed.shape

    def allows(b: int, i: int, j: int) -> bool:
        row = 0 if rows == 1 else i - (columns - rows)
        column = 0 if rows == columns == 1 else j
        inside = 0 <= row < rows and 0 <= column < columns
        return inside and bool(mask.allowed[0 if batch == 1 else b, 0, row, column])

    return allows


def _key_ranges(mask: KeyRanges) -> Rule:
    items, rows, _ = mask.starts.shape

    def allows(b: int, i: int, j: int) -> bool:
        row, item = (0 if rows == 1 else i - (mask.columns - rows)), (b if items > 1 else 0)
        ranges = zip(mask.starts[item, row], mask.ends[item, row], strict=True) if 0 <= row < rows else ()
        return any(start <= j < end for start, end in ranges)

    return allows


def _predicate(mask: masks.Predicate) -> Rule:
    return lambda b, i, j: bool(mask.function(*map(torch.tensor, (b, 0, i, j))))


def _on_grid(sees: Callable[[Any, int, int, int, int], bool]) -> Callable[[Any], Rule]:
    """Return a rule on rows and columns of cells: ``sees(mask, y, x, key's y, key's x)``."""

    def of(mask: Any) -> Rule:
        def allows(b: int, i: int, j: int) -> bool:
            inside = all(0 <= p < mask.height * mask.width for p in (i, j))
            return inside and sees(mask, *divmod(i, mask.width), *divmod(j, mask.width))

        return allows

    return of


def _is_near(mask: masks.Neighborhood, y: int, x: int, v: int, u: int) -> bool:
    return abs(y - v) <= mask.radius[0] and abs(x - u) <= mask.radius[1]


def _is_in_line(mask: masks.Axial, y: int, x: int, v: int, u: int) -> bool:
    return (mask.axis != "columns" and y == v) or (mask.axis != "rows" and x == u)


def _share_window(mask: masks.ShiftedWindows, y: int, x: int, v: int, u: int) -> bool:
    return all((a - mask.shift) // mask.window == (c - mask.shift) // mask.window for a, c in ((y, v), (x, u)))


def _after(mask: masks.After) -> Rule:
    inner, n = rule(mask.rule), mask.length
    return lambda b, i, j: i >= n and j >= n and inner(b, i - n, j - n)


def _joined(test: Callable[..., bool]) -> Callable[[Any], Rule]:
    def of(mask: masks.And | masks.Or) -> Rule:
        parts = [rule(part) for part in mask.parts]
        return lambda b, i, j: test(part(b, i, j) for part in parts)

    return of


def _not(mask: masks.Not) -> Rule:
    part = rule(mask.part)
    return lambda b, i, j: not part(b, i, j)


_RULES: dict[type, Callable[[Any], Rule]] = {
    masks.Full: lambda mask: lambda b, i, j: True,
    masks.Causal: lambda mask: lambda b, i, j: j <= i,
    masks.Window: _window,
    masks.Global: _global,
    masks.Strided: _strided,
    masks.Prefix: _prefix,
    masks.Segments: _segments,
    masks.Random: _random,
    masks.Blocks: _blocks,
    masks.Coarse: _coarse,
    masks.Neighborhood: _on_grid(_is_near),
    masks.Axial: _on_grid(_is_in_line),
    masks.ShiftedWindows: _on_grid(_share_window),
    masks.After: _after,
    masks.Padding: _padding,
    masks.PerItem: _per_item,
    masks.Documents: _documents,
    masks.PrefixPerDocument: _prefix_per_document,
    masks.ImageBidirectional: _image_bidirectional,
    masks.Tree: _tree,
    masks.BlockDiffusion: _block_diffusion,
    masks.Dense: _dense,
    KeyRanges: _key_ranges,
    masks.Predicate: _predicate,
    masks.And: _joined(all),
    masks.Or: _joined(any),
    masks.Not: _not,
}
