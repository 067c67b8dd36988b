"""How large the largest tensor is that a computation makes, wherever it makes it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

__all__ = ["largest_tensor"]


def largest_tensor(compute: Callable[[], object]) -> int:
    """Bytes of the largest tensor that some operation returns while computing, forward and backward.

    Buffers that an operation allocates and frees inside compiled code are not seen.
    """
    compute()  # whatever is only made once, for all calls, is made outside of the measurement
    with _Watch() as watch:
        compute()
    return watch.largest


class _Watch(TorchDispatchMode):
    """Notes the size of what every operation returns, those inside of custom operations included."""

    def __init__(self) -> None:
        super().__init__()
        self.largest = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        given = [x for x in tree_leaves((args, kwargs)) if isinstance(x, Tensor)]
        if given and func.namespace not in _BUILT_IN:
            # A mode alone sees only a custom operation, not what it calls: run its kernel with the mode on.
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
