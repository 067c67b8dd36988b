"""The size of the largest tensor that a computation creates."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves


def largest_tensor(compute: Callable[[], object]) -> int:
    """Return the bytes of the largest result of any operation, forward and backward.

    Buffers that an operation allocates and frees inside compiled code are not seen.
    """
    compute()  # a first call creates tensors that later calls reuse
    with _Watch() as watch:
        compute()
    return watch.largest


class _Watch(TorchDispatchMode):
    """A mode that records the size of every result, also inside custom operations."""

    def __init__(self) -> None:
        super().__init__()
        self.largest = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        given = [x for x in tree_leaves((args, kwargs)) if isinstance(x, Tensor)]
        if given and func.namespace not in _BUILT_IN:
            # A mode sees a custom operation but not the operations inside, so run its kernel with the mode on.
            kernel = torch._C._dispatch_key_parse(given[0].device.type.upper())
            with self:
                made = func.redispatch(torch._C.DispatchKeySet(kernel), *args, **kwargs)
        else:
            made = func(*args, **kwargs)
        views = {x.untyped_storage().data_ptr() for x in given}
        fresh = (x.untyped_storage() for x in tree_leaves(made) if isinstance(x, Tensor))
        self.largest = max([self.largest, *(x.nbytes() for x in fresh if x.data_ptr() not in views)])
        return made


_BUILT_IN = ("aten", "prim", "prims")
