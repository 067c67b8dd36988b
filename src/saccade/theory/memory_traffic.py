"""Claim about the traffic between slow and fast memory: tiled attention moves fewer numbers than stored weights do."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from saccade.matrix import attention
from saccade.theory.claim import Draw, claim
from saccade.theory.measurement import Measurements, apart, at_least, at_most, equal, same


class SlowMemory:
    """Tensors in a simulated slow memory that counts the numbers read and written.

    Attributes:
        moved: the count of numbers read or written so far.
    """

    def __init__(self, **tensors: Tensor):
        self._tensors = dict(tensors)
        self.moved = 0

    def fetch(self, name: str, rows: slice = slice(None)) -> Tensor:
        """Read a tensor, or some of its rows, from slow memory into fast memory."""
        part = self._tensors[name][rows]
        self.moved += part.numel()
        return part

    def bring(self, name: str, part: Tensor, rows: slice | None = None) -> None:
        """Write a tensor, or some of its rows, from fast memory to slow memory."""
        self.moved += part.numel()
        if rows is None:
            self._tensors[name] = part
        else:
            self._tensors[name][rows] = part

    def __getitem__(self, name: str) -> Tensor:
        return self._tensors[name]


def stored(memory: SlowMemory, fast: int) -> None:
    """Compute attention in three steps. Each reads its inputs from slow memory and writes its result back."""
    scores = memory.fetch("query") @ memory.fetch("key").T
    memory.bring("scores", scores / scores.new_tensor(memory["query"].shape[1]).sqrt())
    memory.bring("weights", memory.fetch("scores").softmax(-1))
    memory.bring("output", memory.fetch("weights") @ memory.fetch("value"))


def tiled(memory: SlowMemory, fast: int) -> None:
    """Compute attention in tiles that fit into a fast memory of ``fast`` numbers.

    The sums so far are rescaled whenever a tile contains a larger score than all earlier tiles.

    Queries, keys, values, scores and sums each take at most a fifth of the fast memory.
    """
    n, width = memory["query"].shape
    size = max(1, fast // (5 * width))
    keys = min(size, width)
    for start in range(0, n, size):
        rows = slice(start, start + size)
        query = memory.fetch("query", rows) * width**-0.5
        largest = query.new_full((len(query), 1), -torch.inf)
        total, gathered = torch.zeros_like(largest), query.new_zeros(len(query), memory["value"].shape[1])
        for first in range(0, len(memory["key"]), keys):
            block = slice(first, first + keys)
            scores = query @ memory.fetch("key", block).T
            highest = torch.maximum(largest, scores.amax(-1, keepdim=True))
            raised, rescale = (scores - highest).exp(), (largest - highest).exp()
            total = total * rescale + raised.sum(-1, keepdim=True)
            gathered = gathered * rescale + raised @ memory.fetch("value", block)
            largest = highest
        memory.bring("output", gathered / total, rows)


@claim(
    "complexity",
    latex=r"\Theta(n^2d^2/M)\ \text{against}\ \Theta(nd+n^2)",
    source="tutorials; Dao et al. 2022, arXiv:2205.14135, section 3.2, theorem 2",
    verdict="holds if",
    conditions="the fast memory holds many more than d² numbers, as on GPUs: then the keys are read a few times; and "
    "exact means up to rounding, not bit for bit. With less, tiling moves more than storing. The speedup (two to four "
    "times is reported for FlashAttention) depends on the machine: `python -m benchmarks stored` measures it",
)
def tiling_moves_fewer_numbers(
    draw: Draw,
    *,
    tiles: Callable[[SlowMemory, int], None] = tiled,
    stores: Callable[[SlowMemory, int], None] = stored,
) -> Measurements:
    """Tiled attention is exact and moves fewer numbers between slow and fast memory than storing the weights does."""
    n, width = 1024, 64
    x = {name: draw.normal(n, width) for name in ("query", "key", "value")}

    def run(function: Callable[[SlowMemory, int], None], fast: int) -> SlowMemory:
        memory = SlowMemory(**x, output=torch.zeros_like(x["value"]))
        function(memory, fast)
        return memory

    large, small, whole = run(tiles, 5 << 14), run(tiles, 5 << 10), run(stores, 0)
    right = attention(*(tensor[None, None] for tensor in x.values()))[0, 0]
    yield same("tiled, against the definition", large["output"], right, 1e-12)
    bits = float((large["output"] == whole["output"]).double().mean())
    yield at_most("tiled, against weights stored: share of the output that is equal bit for bit", bits, 0.14)
    yield equal("weights stored: numbers moved, against 4 n² + 4 n d", whole.moved, 4 * n**2 + 4 * n * width)
    yield equal("tiled, M = 20 d²: numbers moved, against 2 n d + 10 n² d²/M", large.moved, 2 * n * width * 5)
    yield at_least("how many times fewer", whole.moved / large.moved, 5.0)
    yield apart("tiled, M = 1.25 d²: as a share of what storing moves", small.moved / whole.moved, 0.5, 1.0)
