"""Record the calls that a law makes, with copies of the inputs, so that a script can repeat them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import Tensor

Call = dict[str, Any]
"""The arguments of a call by name, and ``upstream``, the gradient of its output, if one was computed."""


class RecordedCalls:
    """A wrapper that records the calls of a function.

    Attributes:
        calls: the recorded calls, oldest first.
    """

    def __init__(self, function: Callable[..., Any]):
        self.function = function
        self.calls: list[Call] = []

    def __call__(self, query: Tensor, key: Tensor, value: Tensor, mask: Tensor, **options: Any) -> Any:
        arguments = {"query": query, "key": key, "value": value, "mask": mask, **options}
        call: Call = {name: copied(x) if isinstance(x, Tensor) else x for name, x in arguments.items()}
        self.calls.append(call)
        out = self.function(query, key, value, mask, **options)
        if isinstance(out, Tensor) and out.requires_grad:

            def remember(grad: Tensor) -> None:
                call.setdefault("upstream", grad.detach().clone())

            out.register_hook(remember)
        return out


def copied(x: Tensor) -> Tensor:
    """Return a copy of a tensor with the same strides, offset and ``requires_grad``."""
    flat = x.detach()
    if 0 in flat.stride() and flat.numel():
        index = tuple(slice(0, 1) if step == 0 else slice(None) for step in flat.stride())
        copy = flat[index].clone().expand_as(flat)
    else:
        size = (
            flat.storage_offset() + sum((n - 1) * step for n, step in zip(flat.shape, flat.stride(), strict=True)) + 1
        )
        storage = flat.new_zeros(size if flat.numel() else 0)
        copy = storage.as_strided(flat.shape, flat.stride(), flat.storage_offset() if flat.numel() else 0).copy_(flat)
    return copy.requires_grad_() if x.requires_grad else copy
