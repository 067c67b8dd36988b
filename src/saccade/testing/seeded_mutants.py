"""`mutants`: random wrong kernels, each a `BlockedKernel` that makes one mistake on some inputs."""

from __future__ import annotations

import dataclasses
import itertools
import random
from collections.abc import Callable, Iterator
from functools import partial

import torch
from torch import Tensor

from saccade.support.errors import value_error
from saccade.testing.blocked_kernel import Block, BlockedKernel, Edges, even_edges
from saccade.testing.wrong_kernels import Kernel

Sizes = tuple[int, int, int, int, int, int]
"""The numbers of batch items, query heads, key heads, queries and keys, and the head width."""

BLOCK_SIZES = (32, 48, 64, 100, 128)

CONDITIONS: dict[str, Callable[[Sizes], bool]] = {
    "always": lambda s: True,
    "for a width above 64": lambda s: s[5] > 64,
    "for a width of 32": lambda s: s[5] == 32,
    "for several items": lambda s: s[0] > 1,
    "for 8 or more heads": lambda s: s[1] >= 8,
    "for shared keys": lambda s: s[2] < s[1],
    "for as many query heads as key heads": lambda s: s[1] == s[2],
    "for more than 128 keys": lambda s: s[4] > 128,
    "for a length with one token in its last block": lambda s: s[4] % 64 == 1 and s[4] > 1,
    "for a length of whole blocks": lambda s: s[4] % 64 == 0,
    "for fewer queries than keys": lambda s: s[3] < s[4],
}

BLOCK_LOCATIONS: dict[str, Callable[[Block], bool]] = {
    "everywhere": lambda block: True,
    "in the first block of keys": lambda block: block.column in (-1, 0),
    "in the last block of keys": lambda block: block.column in (-1, block.columns - 1),
    "in the first block of rows": lambda block: block.row in (-1, 0),
    "in the last block of rows": lambda block: block.row in (-1, block.rows - 1),
}

TENSOR_PARTS: dict[str, Callable[[Tensor], Tensor]] = {
    "in the last head": lambda x: (torch.arange(x.shape[1], device=x.device) == x.shape[1] - 1)[:, None, None],
    "in the first head": lambda x: (torch.arange(x.shape[1], device=x.device) == 0)[:, None, None],
    "in the last item": lambda x: (torch.arange(len(x), device=x.device) == len(x) - 1)[:, None, None, None],
}


def _last_column_zero(x: Tensor) -> Tensor:
    return torch.cat([x[..., :-1], torch.zeros_like(x[..., -1:])], -1)


def _times(factor: float, x: Tensor) -> Tensor:
    return x * factor


CHANGES: dict[str, Callable[[Tensor], Tensor]] = {
    **{f"times {factor:g}": partial(_times, factor) for factor in (0.0, 0.5, 0.9, 0.99, 1.01, 1.5, 2.0, -1.0)},
    "rounded to half precision": lambda x: x.half().to(x.dtype),
    "rounded to bfloat16": lambda x: x.bfloat16().to(x.dtype),
}
ROW_CHANGES: dict[str, Callable[[Tensor], Tensor]] = {
    "shifted by one column": lambda x: x.roll(1, -1),
    "0 in the last column": _last_column_zero,
}
MASK_CHANGES: dict[str, Callable[[Tensor], Tensor]] = {
    "all visible": torch.ones_like,
    "none visible": torch.zeros_like,
    "inverted": torch.logical_not,
    "shifted by one column": lambda x: x.roll(1, -1),
    "hidden in the last column": _last_column_zero,
}
GROUP_CHANGES: dict[str, Callable[[Tensor], Tensor]] = {
    "interleaved": lambda group: torch.arange(len(group), device=group.device),
    "always the first": torch.zeros_like,
    "shifted by one": lambda group: group + 1,
    "reversed": lambda group: group.flip(0),
}

FORWARD_STEPS = ("scores", "powers", "product", "output")
BACKWARD_STEPS = ("weights", "value_gradient", "weight_gradient", "score_gradient", "query_gradient", "key_gradient")
ROW_STEPS = ("total", "correction", "lse", "delta")

EDGES: dict[str, Edges] = {
    "begin one token later": lambda length, size: [
        slice(b.start + (b.start > 0), b.stop) for b in even_edges(length, size)
    ],
    "begin one token earlier": lambda length, size: [
        slice(max(b.start - 1, 0), b.stop) for b in even_edges(length, size)
    ],
    "end one token earlier": lambda length, size: [
        slice(b.start, b.stop - (b.stop < length)) for b in even_edges(length, size)
    ],
    "leave out the last one": lambda length, size: even_edges(length, size)[: max(1, -(-length // size) - 1)],
    "leave out an incomplete one": lambda length, size: even_edges(length, size)[: max(1, length // size)],
    "leave out the second one": lambda length, size: [b for n, b in enumerate(even_edges(length, size)) if n != 1],
}


@dataclasses.dataclass(frozen=True)
class Mutant:
    """A randomly drawn wrong kernel.

    Attributes:
        name: the mistake, in words.
        block: number of rows and columns of a block.
        condition: name of a condition in `CONDITIONS` on the sizes of the inputs. The mistake affects only inputs that
            satisfy it.
        make: a function of the block size that returns a kernel with the mistake for all inputs.
    """

    name: str
    block: int
    condition: str
    make: Callable[[int], Kernel]

    def __str__(self) -> str:
        return f"{self.name}, {self.condition}, in blocks of {self.block}"

    def reaches(self, sizes: Sizes) -> bool:
        """Return whether the mistake affects inputs of these sizes."""
        return CONDITIONS[self.condition](sizes)

    def kernel(self) -> Kernel:
        """Return a kernel that makes the mistake only on inputs that satisfy the condition."""
        wrong, right = self.make(self.block), BlockedKernel(self.block)

        def call(q: Tensor, k: Tensor, v: Tensor, mask: Tensor) -> Tensor:
            sizes = (len(q), q.shape[1], k.shape[1], q.shape[2], k.shape[2], q.shape[3])
            return (wrong if self.reaches(sizes) else right)(q, k, v, mask)

        return call


def mutants(count: int, seed: int = 0) -> tuple[Mutant, ...]:
    """Draw distinct wrong kernels with random mistakes, conditions and block sizes.

    All kinds of mistakes are about equally frequent.

    Args:
        count: number of kernels, at most 1,000.
        seed: seed of the random choices.
    """
    if not 0 <= count <= 1000:
        raise value_error("count", "be from 0 to 1000", count)
    rng = random.Random(seed)
    kinds = itertools.cycle([list(kind) for kind in _kinds()])
    drawn: dict[tuple[str, str], Mutant] = {}
    while len(drawn) < count:
        name, make, conditions = rng.choice(next(kinds))
        block, condition = rng.choice(BLOCK_SIZES), rng.choice(conditions)
        drawn.setdefault((name, condition), Mutant(name, block, condition, make))
    return tuple(drawn.values())


_Drawn = tuple[str, Callable[[int], Kernel], tuple[str, ...]]
_LONG = ("always", "for more than 128 keys", "for several items", "for shared keys", "for a width above 64")


def _kinds() -> Iterator[Iterator[_Drawn]]:
    """Yield an iterator for each kind of mistake, over (name, kernel factory, possible conditions)."""
    every = tuple(CONDITIONS)
    for step in (*FORWARD_STEPS, *BACKWARD_STEPS):
        yield (
            (f"{step} {what} {where}", _edited(step, change, where), every)
            for what, change in (CHANGES | ROW_CHANGES).items()
            for where in (*BLOCK_LOCATIONS, *TENSOR_PARTS)
        )
    for step in ROW_STEPS:
        regions = [where for where in (*BLOCK_LOCATIONS, *TENSOR_PARTS) if step != "correction" or "first" not in where]
        yield (
            (f"{step} {what} {where}", _edited(step, change, where), _LONG if step == "correction" else every)
            for what, change in CHANGES.items()
            for where in regions
        )
    yield (
        (f"mask {what} {where}", _edited("mask", change, where), _LONG)
        for what, change in MASK_CHANGES.items()
        for where in (*BLOCK_LOCATIONS, *TENSOR_PARTS)
    )
    yield (
        (f"group {what}", _edited("group", change, "everywhere"), ("always", "for shared keys", "for several items"))
        for what, change in GROUP_CHANGES.items()
    )
    yield ((f"blocks of keys {what}", _with_columns(edges), _LONG) for what, edges in EDGES.items())
    yield ((f"blocks of rows {what}", _with_rows(edges), _LONG) for what, edges in EDGES.items())
    yield iter([("maximum times 0 everywhere", _edited("maximum", torch.zeros_like, "everywhere"), _LONG)])


def _edited(step: str, change: Callable[[Tensor], Tensor], where: str) -> Callable[[int], Kernel]:
    """Return a factory of kernels that apply ``change`` to the result of one step, only at the location ``where``."""

    def edit(x: Tensor, block: Block) -> Tensor:
        if where in BLOCK_LOCATIONS:
            return change(x) if BLOCK_LOCATIONS[where](block) and x.numel() else x
        return torch.where(TENSOR_PARTS[where](x), change(x), x) if x.numel() else x

    return lambda block: BlockedKernel(block, {step: edit})


def _with_columns(edges: Edges) -> Callable[[int], Kernel]:
    return lambda block: BlockedKernel(block, column_edges=edges)


def _with_rows(edges: Edges) -> Callable[[int], Kernel]:
    return lambda block: BlockedKernel(block, row_edges=edges)
