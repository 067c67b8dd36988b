"""The size of the largest tensor that a computation creates, as a measure of its memory."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves


def largest_tensor(compute: Callable[[], object]) -> int:
    """Run a computation and return the size in bytes of the largest tensor that any of its operations creates.

    Buffers that an operation allocates and frees inside compiled code are not counted.
    """
    compute()  # the first call creates tensors that later calls reuse
    with _LargestTensor() as watch:
        compute()
    return watch.largest


class _LargestTensor(TorchDispatchMode):
    """A torch dispatch mode that records the size of the largest tensor, including tensors inside custom operations."""

    def __init__(self) -> None:
        super().__init__()
        self.largest = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        tensors = [x for x in tree_leaves((args, kwargs)) if isinstance(x, Tensor)]
        if tensors and func.namespace not in _BUILT_IN:
            # The mode intercepts a custom operation but not the operations inside, so run its kernel with the mode on.
            kernel = torch._C._dispatch_key_parse(tensors[0].device.type.upper())
            with self:
                result = func.redispatch(torch._C.DispatchKeySet(kernel), *args, **kwargs)
        else:
            result = func(*args, **kwargs)
        views = {x.untyped_storage().data_ptr() for x in tensors}
        fresh = (x.untyped_storage() for x in tree_leaves(result) if isinstance(x, Tensor))
        self.largest = max([self.largest, *(x.nbytes() for x in fresh if x.data_ptr() not in views)])
        return result


_BUILT_IN = ("aten", "prim", "prims")
