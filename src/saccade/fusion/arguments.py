"""Arguments of torch functions: tensors among them, in tuples, lists and dicts. torch's own trees take longer."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

from torch import Tensor


def mapped(function: Callable[[Any], Any], tree: Any) -> Any:
    """Return nested tuples, lists and dicts with a function applied to what they hold."""
    if type(tree) is tuple:
        return tuple([mapped(function, x) for x in tree])
    if type(tree) is list:
        return [mapped(function, x) for x in tree]
    if type(tree) is dict:
        return {name: mapped(function, x) for name, x in tree.items()}
    return function(tree)


def tensors_in(tree: Any) -> Iterator[Tensor]:
    """Yield the tensors in nested tuples, lists and dicts."""
    for x in tree.values() if isinstance(tree, dict) else tree:
        if isinstance(x, Tensor):
            yield x
        elif isinstance(x, tuple | list | dict):
            yield from tensors_in(x)
