"""Cases at another length: each position becomes several, and every mask and bias goes with them."""

from __future__ import annotations

import dataclasses
import math

from saccade.masks import (
    After,
    And,
    Axial,
    BlockDiffusion,
    Blocks,
    Causal,
    Coarse,
    Dense,
    Documents,
    Full,
    Global,
    ImageBidirectional,
    Mask,
    Neighborhood,
    Not,
    Or,
    Padding,
    PerItem,
    Predicate,
    Prefix,
    PrefixPerDocument,
    Random,
    Segments,
    ShiftedWindows,
    Strided,
    Tree,
    Window,
)
from saccade.positions import GridTable
from saccade.testing.case import Case


def stretched(case: Case, factor: int) -> Case:
    """The same case with ``factor`` tokens for each, a square number; one query stays one."""
    side = math.isqrt(factor)
    assert side**2 == factor
    q_len = case.q_len if case.q_len == 1 else case.q_len * factor
    kv_len = case.kv_len if case.kv_len == 1 else case.kv_len * factor
    relative = case.relative
    if isinstance(relative, GridTable):
        relative = GridTable(relative.num_heads, relative.height * side, relative.width * side)
    bias = case.bias and (*case.bias[:2], *(1 if x == 1 else x * factor for x in case.bias[2:]))
    return dataclasses.replace(
        case,
        mask=None if case.mask is None else _mask(case.mask, factor, side),
        rule=None,
        q_len=q_len,
        kv_len=kv_len,
        bias=bias,
        relative=relative,
        q_positions=_positions(case.q_positions, factor if case.q_len > 1 else 1),
        kv_positions=_positions(case.kv_positions, factor),
    )


def _mask(mask: Mask, factor: int, side: int) -> Mask:  # noqa: C901, PLR0911, PLR0912  one line for each kind
    def inner(part: Mask) -> Mask:
        return _mask(part, factor, side)

    match mask:
        case Causal() | Full() | Strided() | Predicate():
            return mask
        case And() | Or():
            return type(mask)(tuple(map(inner, mask.parts)))
        case PerItem():
            return PerItem(map(inner, mask.rules))
        case Not():
            return ~inner(mask.part)
        case After():
            return inner(mask.rule).after(mask.length * factor)
        case Coarse():
            return Coarse(mask.rule, mask.block_size * factor)
        case Window():
            return Window(*(None if end is None else end * factor for end in (mask.left, mask.right)))
        case Global():
            return Global(tuple(p * factor for p in mask.positions), sees=mask.sees, seen=mask.seen)
        case Prefix():
            return Prefix(mask.length * factor)
        case Segments():
            return Segments(mask.segment * factor, mask.memory * factor)
        case Blocks():
            return dataclasses.replace(mask, block_size=mask.block_size * factor)
        case Random():
            return Random(mask.blocks_per_row, mask.block_size * factor, mask.seed)
        case Padding():
            padded = None if mask.padded_len is None else mask.padded_len * factor
            return Padding([x * factor for x in mask.lengths], mask.side, padded)
        case Documents():
            lengths = [[x * factor for x in own] for own in mask.lengths]
            return Documents(lengths, rule=None if mask.rule is None else inner(mask.rule))
        case PrefixPerDocument():
            return PrefixPerDocument(*([[x * factor for x in own] for own in x] for x in (mask.lengths, mask.prefixes)))
        case BlockDiffusion():
            return BlockDiffusion(mask.block * factor, mask.length * factor)
        case ImageBidirectional():
            return ImageBidirectional([[x for x in own for _ in range(factor)] for own in mask.groups])
        case Tree():
            return Tree([_chains(own, factor) for own in mask.parents])
        case Dense():
            return Dense(mask.allowed.repeat_interleave(factor, -2).repeat_interleave(factor, -1))
        case Neighborhood():
            return Neighborhood(mask.height * side, mask.width * side, tuple(x * side for x in mask.radius))
        case Axial():
            return Axial(mask.height * side, mask.width * side, mask.axis)
        case ShiftedWindows():
            sizes = (mask.height, mask.width, mask.window, mask.shift)
            return ShiftedWindows(*(x * side for x in sizes))
    raise NotImplementedError(f"say how a {type(mask).__name__} is stretched")


def _chains(parents: tuple[int, ...], factor: int) -> list[int]:
    """Return the parents of a tree in which each token has become a chain."""
    ends = [-1 if parent < 0 else parent * factor + factor - 1 for parent in parents]
    return [i * factor + j - 1 if j else end for i, end in enumerate(ends) for j in range(factor)]


def _positions(given: object, factor: int) -> object:
    if given is None:
        return None
    if isinstance(given[0], tuple):
        return tuple(_positions(row, factor) for row in given)
    return tuple(p if p < 0 else p * factor + i for p in given for i in range(factor))
