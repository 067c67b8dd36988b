"""How many bytes are held at once: reckoned step by step, or counted while something small is run."""

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
    """Bytes that a step holds at most while it is taken, what comes of it included, and those of what comes of it."""

    most: int
    left: int


class Cost(NamedTuple):
    """Return the cost of a forward product.

    Attributes:
        tiles: boxes of the plan that it runs.
        pairs: query-key pairs whose scores it computes, over batch and heads.
        held: bytes beside its inputs; its output and lse are what is left.
    """

    tiles: int
    pairs: int
    held: Held


def bytes_widened(entries: int, dtype: torch.dtype) -> int:
    """Return the bytes that torch holds while it sums half precision: a copy in float32."""
    return 4 * entries if dtype in (torch.float16, torch.bfloat16) else 0


class Ledger:
    """Bytes that are held now, and the most that ever were: what a run would take and give back, without the run."""

    def __init__(self) -> None:
        self.now = self.most = 0

    def take(self, size: float) -> None:
        """Add bytes that are held from now on."""
        self.now += int(size)
        self.most = max(self.most, self.now)

    def give(self, size: float) -> None:
        """Subtract bytes that are no longer held."""
        self.now -= int(size)

    def touch(self, size: float) -> None:
        """Taken, and given back at once."""
        self.most = max(self.most, self.now + int(size))

    def step(self, held: Held) -> None:
        """Something is done, and what comes of it is kept."""
        self.touch(held.most)
        self.take(held.left)

    @contextmanager
    def holding(self, size: float) -> Iterator[None]:
        """Bytes that are held for a while."""
        self.take(size)
        yield
        self.give(size)


def counted(run: Callable[[], object]) -> Held:
    """Count the bytes of tensors while a function runs, and of its result; inputs are not counted."""
    with Watch() as watch:
        result = run()
    left = watch.now
    del result
    return Held(watch.most, left)


class Watch(TorchDispatchMode):
    """Counts storages from the operation that returns them until nothing refers to them.

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
        """Tensors that an operation has returned, of those that it was given."""
        known = {id(x.untyped_storage()) for x in tree_leaves(given) if isinstance(x, Tensor)}
        for x in tree_leaves(made):
            if isinstance(x, Tensor):
                self._note(x.untyped_storage(), known)

    def touch(self, size: int) -> None:
        """So many more bytes are held for a moment, unseen."""
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
