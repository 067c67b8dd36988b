"""Find products of a softmax's result: attention that a module computes in operations of its own."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F
from torch.utils._pytree import tree_leaves
from torch.utils.weak import WeakIdKeyDictionary

_SOFTMAX: frozenset[Callable[..., Any]] = frozenset(
    {F.softmax, torch.softmax, Tensor.softmax, torch.special.softmax, F.gumbel_softmax}
)
_PRODUCTS = frozenset(
    {
        *(torch.matmul, torch.bmm, torch.mm, torch.mv, torch.baddbmm, torch.addbmm, torch.addmm, torch.addmv),
        *(torch.einsum, torch.tensordot, torch.chain_matmul, torch.linalg.multi_dot),
        *(Tensor.matmul, Tensor.__matmul__, Tensor.__rmatmul__, Tensor.bmm, Tensor.mm, Tensor.mv),
        *(Tensor.baddbmm, Tensor.addbmm, Tensor.addmm, Tensor.addmv),
    }
)
# Functions that select, join or repeat weights. Of any other, the result holds weights if it has as many numbers.
_PARTS = frozenset(
    {
        *("__getitem__", "select", "narrow", "index_select", "gather", "take_along_dim", "chunk", "split", "unfold"),
        *("split_with_sizes", "tensor_split", "unbind", "as_strided", "cat", "concat", "stack", "expand", "expand_as"),
        *("broadcast_to", "repeat", "repeat_interleave", "tile", "pad", "constant_pad_nd"),
    }
)


class SoftmaxProducts:
    """Follows results of softmax through casts, views, dropout, masking and other elementwise operations.

    Each thread follows its own. Results are referred to weakly: nothing lives longer for it. A classifier's or router's
    softmax whose weights are multiplied elementwise enters no product.

    Cost: a look at the arguments of each operation while a followed tensor lives.
    """

    def __init__(self) -> None:
        self._here = _Here()

    def is_one(self, func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any], out: Any) -> bool:
        """Look at an operation that has run; return whether it was a product of a softmax's result."""
        weights = self._here.weights
        if func in _SOFTMAX:
            weights[out] = True
            return False
        if not weights:
            return False
        entering = [x for x in _tensors(args, kwargs) if x in weights]
        if not entering:
            return False
        if func in _PRODUCTS:
            return True
        name = getattr(func, "__name__", "")
        if name == "__setitem__":
            weights[args[0]] = True
        sizes = {x.numel() for x in entering}
        for x in _tensors((out,), {}):
            if name in _PARTS or x.numel() in sizes:
                weights[x] = True
        return False


class _Here(threading.local):
    def __init__(self) -> None:
        self.weights: Any = WeakIdKeyDictionary()


def _tensors(args: tuple[Any, ...], kwargs: dict[str, Any]) -> Iterator[Tensor]:
    for x in (*args, *kwargs.values()):
        if isinstance(x, Tensor):
            yield x
        elif isinstance(x, tuple | list):
            yield from (leaf for leaf in tree_leaves(x) if isinstance(leaf, Tensor))
