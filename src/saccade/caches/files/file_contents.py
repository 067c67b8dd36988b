"""Contents: the part of a file that describes one cache, checked when it is read."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from saccade.caches.call_arguments import KeyValueSpec
from saccade.caches.state_tensors import Leaf
from saccade.support.numerics import wide_dtype

_FLOATS = (torch.float16, torch.bfloat16, torch.float32, torch.float64)
_LARGEST = 1 << 31  # largest value of a count
_FARTHEST = 1 << 40  # largest position
_LARGEST_EMPTY = 1 << 20  # largest axis size of an empty tensor, because the file length does not limit it


class MisfitError(Exception):
    """An error in the contents of a cache file. Its message completes the phrase "a file that …"."""


class Contents:
    """The part of a file that describes one cache: JSON values and tensors.

    Args:
        tree: the plain values, by name.
        name: prefix of the names of the cache's tensors.
        tensors: all tensors of the file, by name.

    Raises:
        MisfitError: a part is missing, or has an unexpected type, shape or size. Every method may raise it.
    """

    def __init__(self, tree: object, name: str, tensors: Mapping[str, Tensor]):
        if not isinstance(tree, dict) or not isinstance(tree.get("kind"), str):
            raise MisfitError("does not describe a cache")
        self._tree, self._name, self._tensors = tree, name, tensors
        self.kind: str = tree["kind"]

    def has_value(self, key: str) -> bool:
        """Return whether the cache file has a value with this name."""
        return key in self._tree

    def value(self, key: str) -> Any:
        """Return the value with this name from the cache file; it may have any type."""
        if key not in self._tree:
            raise MisfitError(f"lacks the value {key} of a {self.kind}")
        return self._tree[key]

    def part(self, key: str) -> Contents:
        """Return a named group of values from the cache file, as `Contents` of its own."""
        inner = self.value(key)
        if not isinstance(inner, dict):
            raise self.misfit(key)
        return Contents({**inner, "kind": self.kind}, self._name, self._tensors)

    def count(self, key: str, least: int = 0, most: int = _LARGEST) -> int:
        """Return an int from the cache file. Raise an error if it is out of range."""
        number = self.value(key)
        if isinstance(number, bool) or not isinstance(number, int) or not least <= number <= most:
            raise self.misfit(key)
        return number

    def count_or_none(self, key: str, least: int = 0, most: int = _LARGEST) -> int | None:
        """Return an int or None from the cache file. Raise an error if it is out of range."""
        return None if self.value(key) is None else self.count(key, least, most)

    def position(self, key: str) -> int:
        """Return a position or a number of tokens from the cache file. Raise an error if it is out of range."""
        return self.count(key, 0, _FARTHEST)

    def misfit(self, what: str) -> MisfitError:
        """Return the error for a part of the cache file that has an invalid size or type."""
        return MisfitError(f"has invalid {what} for a {self.kind}")

    def has(self, name: str) -> bool:
        """Return whether the cache file has a tensor with this name."""
        return self._name + name in self._tensors

    def is_empty(self, leaves: Sequence[Leaf]) -> bool:
        """Return whether the saved cache is empty. Raise an error if the file of an empty cache contains tokens."""
        is_empty = self.value("first") is None if not self.has_value("length") else self.position("length") == 0
        has_tokens = any(self.has(leaf.name) and self._tensors[self._name + leaf.name].numel() for leaf in leaves)
        if is_empty and (has_tokens or (self.has_value("next") and self.count("next", 0, 0))):
            raise self.misfit("length")
        return is_empty

    def leaf(self, leaf: Leaf, sizes: dict[str, int], dtype: torch.dtype | None = None) -> Tensor:
        """Return one tensor of the cache's state from the file.

        Args:
            leaf: the declaration of the tensor.
            sizes: known sizes of axes, by name. The sizes of other axes are added.
            dtype: dtype of the keys; None if this tensor contains the keys.
        """
        if not self.has(leaf.name):
            raise MisfitError(f"lacks the tensor {self._name}{leaf.name} of a {self.kind}")
        x, axes = self._tensors[self._name + leaf.name], leaf.axes.split()
        if axes[0] == "batch|1" and x.dim():
            x = torch.atleast_2d(x) if len(axes) > 1 else x
            axes[0] = "batch" if len(x) != 1 else "1"
        allowed = {
            "float": _FLOATS if dtype is None else (dtype,),
            "wide": (torch.float32, torch.float64) if dtype is None else (wide_dtype(dtype),),
            "positions": (torch.int64,),
            "int8": (torch.int8,),
            "bool": (torch.bool,),
        }[leaf.dtype]
        fits = x.dim() == len(axes) and x.dtype in allowed and (x.numel() or max(x.shape, default=0) <= _LARGEST_EMPTY)
        if not fits or any(sizes.setdefault(axis, size) != size for axis, size in zip(axes, x.shape, strict=True)):
            raise self.misfit(f"tensor {self._name}{leaf.name}")
        is_table = leaf.dtype == "positions" and x.numel() > 0
        if is_table and not (int(x.min()) >= -1 and int(x.max()) <= _FARTHEST):
            raise self.misfit(f"tensor {self._name}{leaf.name}")
        return x

    def state(
        self, leaves: Sequence[Leaf], sizes: dict[str, int]
    ) -> tuple[dict[str, Tensor], dict[str, int], KeyValueSpec]:
        """Return the file's state tensors by name, the axis sizes, and the spec of keys and values.

        Args:
            leaves: the declarations of the tensors, keys first.
            sizes: the known sizes of axes, by name.
        """
        state: dict[str, Tensor] = {}
        for leaf in leaves:
            if leaf.is_saved and not (leaf.is_optional and not self.has(leaf.name)):
                dtype = next((x.dtype for x in state.values()), None)
                state[leaf.name] = self.leaf(leaf, sizes, dtype)
        if not sizes["kv_heads"]:
            raise self.misfit("number of key heads")
        known = {name: sizes[name] for name in ("batch", "kv_heads", "head_dim", "value_dim")}
        first = next(iter(state.values()))
        return state, sizes, KeyValueSpec(**known, dtype=first.dtype, device=first.device)

    def positions(self, batch: int, columns: int) -> range | Tensor:
        """Return the saved positions of the cache's columns."""
        first = self.position("first")
        if not self.has("positions"):
            return range(first, first + columns)
        return self.leaf(Leaf("positions", "batch columns", "positions"), {"batch": batch, "columns": columns})

    def upcoming(self, batch: int, reached: Tensor | None) -> int | Tensor:
        """Return each item's next position from the file. Raise an error unless it is above every position reached.

        Args:
            batch: number of batch items.
            reached: positions of the stored tokens, ``[batch | 1, ...]``; None if there are none.
        """
        reached = torch.empty(1, 0, dtype=torch.int64, device="cpu") if reached is None else reached
        after: int | Tensor = self.position("next") if not self.has("next") else 0
        if self.has("next"):
            after = self.leaf(Leaf("next", "batch", "positions"), {"batch": batch})
        floor = reached.flatten(1).amax(1) + 1 if reached.shape[1:].numel() else reached.new_zeros(len(reached))
        if bool((floor > after).any()) or (isinstance(after, Tensor) and bool((after < 0).any())):
            raise self.misfit("next")
        return after

    def check_room(self, key: Tensor, value: Tensor, columns: int) -> None:
        """Raise an error, before any memory is allocated, if a file describes more columns than fit into memory."""
        column_bytes = sum(x.shape[0] * x.shape[1] * x.shape[3] * x.element_size() for x in (key, value))
        if column_bytes * columns > _memory_bytes():
            raise MisfitError(
                f"needs {column_bytes * columns:,} bytes of memory for a {self.kind}, more than this machine has"
            )


def _memory_bytes() -> int:
    """Return the memory size of this machine in bytes, or a large number if the system does not report it."""
    with contextlib.suppress(AttributeError, ValueError, OSError):
        return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    return 1 << 40
