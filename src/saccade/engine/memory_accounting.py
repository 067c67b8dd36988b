"""Memory accounting: peak bytes computed step by step, or measured while a small part of a product runs."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves


class Held(NamedTuple):
    """Peak bytes of one step, its result included, and the bytes of the result."""

    most: int
    left: int


class Cost(NamedTuple):
    """The cost of a kernel's forward product: tiles, query-key pairs and bytes.

    Attributes:
        tiles: boxes of the plan that it runs.
        pairs: query-key pairs whose scores it computes, over batch and heads.
        held: bytes beside its inputs; its output and lse are what is left.
    """

    tiles: int
    pairs: int
    held: Held


def bytes_widened(entries: int, dtype: torch.dtype) -> int:
    """Return the bytes of the float32 copy that torch makes to sum half-precision numbers; 0 for other dtypes."""
    return 4 * entries if dtype in (torch.float16, torch.bfloat16) else 0


class Ledger:
    """A simulated memory account: current and peak bytes of a run that does not take place."""

    def __init__(self) -> None:
        self.now = self.most = 0

    def take(self, size: float) -> None:
        """Add allocated bytes."""
        self.now += int(size)
        self.most = max(self.most, self.now)

    def give(self, size: float) -> None:
        """Subtract freed bytes."""
        self.now -= int(size)

    def touch(self, size: float) -> None:
        """Account for bytes that are allocated and freed at once."""
        self.most = max(self.most, self.now + int(size))

    def step(self, held: Held) -> None:
        """Account for a step: its peak, and the result that stays allocated."""
        self.touch(held.most)
        self.take(held.left)

    @contextmanager
    def holding(self, size: float) -> Iterator[None]:
        """Account for bytes that stay allocated within a ``with`` block."""
        self.take(size)
        yield
        self.give(size)


def counted(run: Callable[[], object]) -> Held:
    """Return the peak bytes of tensors while a function runs, and the bytes of its result; inputs are not counted."""
    with Watch() as watch:
        result = run()
    left = watch.now
    del result
    return Held(watch.most, left)


class Watch(TorchDispatchMode):
    """A dispatch mode that counts the bytes of tensor storages from their allocation until they are freed.

    Attributes:
        now, most: bytes that are held, and the most that ever were.
    """

    def __init__(self) -> None:
        super().__init__()
        self.now = self.most = 0
        self._seen: dict[int, int] = {}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        made = func(*args, **(kwargs or {}))
        self.note(made, (args, kwargs))
        return made

    def note(self, made: object, given: object) -> None:
        """Count the storages of an operation's results, except for those of its inputs."""
        known = {id(x.untyped_storage()) for x in tree_leaves(given) if isinstance(x, Tensor)}
        for x in tree_leaves(made):
            if isinstance(x, Tensor):
                self._note(x.untyped_storage(), known)

    def touch(self, size: int) -> None:
        """Account for bytes that an operation allocates and frees internally."""
        self.most = max(self.most, self.now + size)

    def _note(self, storage: torch.UntypedStorage, given: set[int]) -> None:
        number, size = id(storage), storage.nbytes()
        if number in given or number in self._seen:
            return
        self._seen[number] = size
        self.now += size
        self.most = max(self.most, self.now)
        weakref.finalize(storage, self._forget, number)

    def _forget(self, number: int) -> None:
        self.now -= self._seen.pop(number)
