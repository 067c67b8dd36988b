"""Told: what a file says of a cache, looked at before it is believed."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

__all__ = ["FLOATS", "MisfitError", "Told", "check_room"]

FLOATS = (torch.float16, torch.bfloat16, torch.float32, torch.float64)
_LARGEST = 1 << 31  # of anything that is counted
_FARTHEST = 1 << 40  # of positions
_NOBODY = 1 << 20  # columns, heads and so on of a tensor that has no elements: no file's length stands behind them


class MisfitError(Exception):
    """A fragment that goes on after "a file that": whatever its checksum says, no cache was written so."""


class Told:
    """One cache in a file: a few values, and tensors.

    Args:
        tree: the values.
        name: what the names of its tensors begin with.
        tensors: those of the whole file.

    Raises:
        MisfitError: in every method, what is there is of another type, shape or size.
    """

    def __init__(self, tree: object, name: str, tensors: Mapping[str, Tensor]):
        if not isinstance(tree, dict) or not isinstance(tree.get("kind"), str):
            raise MisfitError("describes no cache")
        self._tree, self.name, self.tensors = tree, name, tensors
        self.kind: str = tree["kind"]

    def value(self, key: str) -> Any:
        """Whatever stands there."""
        if key not in self._tree:
            raise MisfitError(f"does not say {key} of a {self.kind}")
        return self._tree[key]

    def part(self, key: str) -> Told:
        """The values in a group of them."""
        inner = self.value(key)
        if not isinstance(inner, dict):
            raise self.misfit(key)
        return Told({**inner, "kind": self.kind}, self.name, self.tensors)

    def count(self, key: str, least: int = 0, most: int = _LARGEST) -> int:
        """An int."""
        found = self.value(key)
        if isinstance(found, bool) or not isinstance(found, int) or not least <= found <= most:
            raise self.misfit(key)
        return found

    def counts(self, *keys: str) -> dict[str, int]:
        """Some ints."""
        return {key: self.count(key) for key in keys}

    def count_or_none(self, key: str, least: int = 0, most: int = _LARGEST) -> int | None:
        """An int or null."""
        return None if self.value(key) is None else self.count(key, least, most)

    def place(self, key: str) -> int:
        """A position."""
        return self.count(key, 0, _FARTHEST)

    def misfit(self, what: str) -> MisfitError:
        """That something has another size or type than it can have."""
        return MisfitError(f"has no possible {what} of a {self.kind}")

    def has(self, key: str) -> bool:
        """Whether a tensor is there."""
        return self.name + key in self.tensors

    def tensor(self, key: str, shape: Sequence[int | None], dtypes: Sequence[torch.dtype]) -> Tensor:
        """A tensor.

        Args:
            key: its name, without that of the cache.
            shape: what it must have; None where any size will do.
            dtypes: of which it must have one.
        """
        if not self.has(key):
            raise MisfitError(f"lacks the tensor {self.name}{key} of a {self.kind}")
        x = self.tensors[self.name + key]
        fits = x.dim() == len(shape) and all(size in (None, own) for size, own in zip(shape, x.shape, strict=False))
        if not fits or x.dtype not in dtypes or (not x.numel() and max(x.shape, default=0) > _NOBODY):
            raise self.misfit(f"tensor {self.name}{key}")
        return x

    def pair(self, keys: tuple[str, str] = ("key", "value"), *, columns: int | None = None) -> tuple[Tensor, Tensor]:
        """Keys and values, ``[batch, kv_heads, columns, width]``, alike but for their widths."""
        key = self.tensor(keys[0], (None, None, columns, None), FLOATS)
        if not key.shape[1]:
            raise self.misfit(f"tensor {self.name}{keys[0]}")
        return key, self.tensor(keys[1], (*key.shape[:3], None), (key.dtype,))

    def table(self, key: str, shape: Sequence[int | None]) -> Tensor:
        """Positions, -1 where no token stands."""
        x = self.tensor(key, shape, (torch.int64,))
        if x.numel() and not (int(x.min()) >= -1 and int(x.max()) <= _FARTHEST):
            raise self.misfit(f"tensor {self.name}{key}")
        return x

    def upcoming(self, batch: int, reached: Tensor) -> int | Tensor:
        """Where the next token of each item stands: behind those that stand at ``reached``, ``[batch | 1, ...]``."""
        after: int | Tensor = self.table("next", (batch,)) if self.has("next") else self.place("next")
        floor = reached.flatten(1).amax(1) + 1 if reached.shape[1:].numel() else reached.new_zeros(len(reached))
        if bool((floor > after).any()) or (isinstance(after, Tensor) and bool((after < 0).any())):
            raise self.misfit("next")
        return after


def check_room(told: Told, key: Tensor, value: Tensor, columns: int) -> None:
    """Refuse room for more columns than the machine could hold, before it is taken."""
    each = sum(x.shape[0] * x.shape[1] * x.shape[3] * x.element_size() for x in (key, value))
    room = each * columns
    if room > _machine():
        raise MisfitError(f"asks for {room:,} bytes of room for a {told.kind}, more than this machine has")


def _machine() -> int:
    """Bytes of memory of this machine; where nobody says, more than most have."""
    with contextlib.suppress(AttributeError, ValueError, OSError):
        return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    return 1 << 40
