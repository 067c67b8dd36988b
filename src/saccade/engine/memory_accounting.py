"""Memory accounting: peak memory of a computation, in bytes, simulated or measured on a small part of it."""

from __future__ import annotations

import math
import weakref
from collections.abc import Callable, Hashable, Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from saccade.engine.inputs import AttentionInputs
from saccade.plan import ColumnRange, Plan, Tile


class MemoryUse(NamedTuple):
    """The peak memory of one stage of a computation, including its result, and the memory of the result, in bytes."""

    most: int
    left: int


class Cost(NamedTuple):
    """Cost of a kernel's forward pass: tiles, query-key pairs and bytes.

    Attributes:
        tiles: number of tiles of the plan that the kernel computes.
        pairs: number of query-key pairs whose scores the kernel computes, summed over batch and heads.
        held: peak memory, not counting the inputs, and the memory of output and lse, in bytes.
    """

    tiles: int
    pairs: int
    held: MemoryUse


def bytes_widened(entries: int, dtype: torch.dtype) -> int:
    """Return the bytes of the float32 copy that torch makes to sum a half-precision tensor; 0 for other dtypes."""
    return 4 * entries if dtype in (torch.float16, torch.bfloat16) else 0


class Ledger:
    """A memory account of a simulated run, with its current and its peak memory, in bytes."""

    def __init__(self) -> None:
        self.now = self.most = 0

    def allocate(self, size: float) -> None:
        """Add allocated bytes to the current bytes."""
        self.now += int(size)
        self.most = max(self.most, self.now)

    def free(self, size: float) -> None:
        """Subtract freed bytes from the current bytes."""
        self.now -= int(size)

    def touch(self, size: float) -> None:
        """Account for bytes that are allocated and then freed immediately."""
        self.most = max(self.most, self.now + int(size))

    def step(self, held: MemoryUse) -> None:
        """Account for one stage of a computation, whose result stays allocated."""
        self.touch(held.most)
        self.allocate(held.left)

    @contextmanager
    def holding(self, size: float) -> Iterator[None]:
        """Account for bytes that stay allocated during a ``with`` block."""
        self.allocate(size)
        yield
        self.free(size)


def counted(run: Callable[[], object]) -> MemoryUse:
    """Run a function; return the peak memory of the tensors that it creates and the memory of its result, in bytes."""
    with Watch() as watch:
        result = run()
    left = watch.now
    del result
    return MemoryUse(watch.most, left)


class Watch(TorchDispatchMode):
    """A torch dispatch mode that counts the bytes of tensor storages from their creation until they are freed.

    Attributes:
        now, most: current bytes, and their maximum so far.
    """

    def __init__(self) -> None:
        super().__init__()
        self.now = self.most = 0
        self._sizes: dict[int, int] = {}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        results = func(*args, **(kwargs or {}))
        self.note(results, (args, kwargs))
        return results

    def note(self, results: object, inputs: object) -> None:
        """Count the storages of an operation's results, except those shared with the operation's inputs."""
        known = {id(x.untyped_storage()) for x in tree_leaves(inputs) if isinstance(x, Tensor)}
        for x in tree_leaves(results):
            if isinstance(x, Tensor):
                self._note(x.untyped_storage(), known)

    def touch(self, size: int) -> None:
        """Account for bytes that an operation allocates and frees internally."""
        self.most = max(self.most, self.now + size)

    def _note(self, storage: torch.UntypedStorage, known: set[int]) -> None:
        number, size = id(storage), storage.nbytes()
        if number in known or number in self._sizes:
            return
        self._sizes[number] = size
        self.now += size
        self.most = max(self.most, self.now)
        weakref.finalize(storage, self._forget, number)

    def _forget(self, number: int) -> None:
        self.now -= self._sizes.pop(number)


_SIDE, _ENTRIES = 256, 1 << 18  # rows and columns of the measured part, and its number of pairs over batch and heads
_SHARES = 8  # shares of partial columns are rounded up to multiples of 1 / _SHARES


class Probe:
    """A probe that runs a function on a small part of a tile to estimate how many bytes it allocates for the tile.

    Queries and keys are replaced by zeros that take no memory.

    Args:
        inputs: the checked inputs.
        is_narrow: whether ``run`` may use queries and keys of width 1, because they take little memory compared with
            the pairs.
    """

    def __init__(self, inputs: AttentionInputs, *, is_narrow: bool = False):
        self._inputs = _with_zeros(inputs, 1 if is_narrow and inputs.tile_function is None else None)
        self._measured: dict[Hashable, tuple[float, float]] = {}

    def held(self, name: str, tile: Tile, run: Callable[[AttentionInputs, Tile], object]) -> MemoryUse:
        """Return the memory use of ``run`` on a tile, scaled up from a part. Similar tiles are measured only once."""
        if tile.height * tile.width == 0:
            return MemoryUse(0, 0)
        copies = (tile.batch.stop - tile.batch.start, tile.heads.stop - tile.heads.start)
        key = (name, id(tile.rule), copies, min(tile.height, _SIDE), _memory_class(tile))
        if key not in self._measured:
            part = _small_part(tile, math.prod(copies))
            # An empty plan, so that parts of tiles are not cached with the plan of the inputs.
            inputs = self._inputs.replaced(plan=Plan(self._inputs.shape, ()))
            with torch.no_grad():
                measured = counted(lambda: run(inputs, part))
            pairs = part.height * part.width
            self._measured[key] = measured.most / pairs, measured.left / pairs
        most, left = (int(each * tile.height * tile.width) for each in self._measured[key])
        return MemoryUse(most, left)


def _with_zeros(inputs: AttentionInputs, width: int | None) -> AttentionInputs:
    """Replace tensors of the inputs by zeros that take no memory. Tensors on the meta device move to the CPU."""

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


def _memory_class(tile: Tile) -> Hashable:
    """Return a cache key that is equal for tiles with equal strides and similar shares of partial columns."""
    undecided = [len(strip.keys) for strip in tile.columns if strip.partial is not True]
    shares = (-(-_SHARES * size // tile.width) for size in (sum(undecided), max(undecided, default=0)))
    return (tile.rows.step, tile.columns[0].keys.step, min(len(tile.columns), 2), *shares)


def _small_part(tile: Tile, copies: int) -> Tile:
    """Return a small part of a tile for measuring memory: its first rows, and the start of each column range."""
    side = max(16, min(_SIDE, math.isqrt(_ENTRIES // copies)))
    share = min(1.0, side / tile.width)
    columns = tuple(
        ColumnRange(
            strip.keys[: math.ceil(share * len(strip.keys))], strip.partial if strip.partial is True else "some"
        )
        for strip in tile.columns
    )
    return tile._replace(rows=tile.rows[:side], columns=columns)
