"""Memory: which lazy tensors are views of the same memory, so that a write to one of them changes the others."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from saccade.fusion.operations import functions
from saccade.fusion.product_spellings import Product
from saccade.fusion.scores import Scores

# Each of these returns a tensor in the memory of its argument.
_VIEWS = frozenset(
    {
        *functions("view_as", "unsqueeze", "squeeze", "transpose", "swapaxes", "swapdims", "permute", "expand"),
        *functions("unflatten"),
        *(Tensor.view, Tensor.mT.__get__, Tensor.__getitem__),  # type: ignore[attr-defined]
    }
)
# Each of these does so if its argument is contiguous.
_VIEWS_OF_CONTIGUOUS = frozenset(functions("reshape", "reshape_as", "flatten", "contiguous"))
_MOVING_AXES = frozenset(
    {*functions("transpose", "swapaxes", "swapdims", "permute"), Tensor.mT.__get__}  # type: ignore[attr-defined]
)
# Each of these returns a tensor in memory of its own, in the order of its first argument. Casts that change nothing
# are not deferred.
_ALLOCATING = frozenset(
    {
        *functions("mul", "multiply", "__mul__", "__rmul__", "div", "divide", "true_divide", "__truediv__", "__div__"),
        *functions("add", "__add__", "__radd__", "sub", "subtract", "__sub__", "neg", "negative", "__neg__"),
        *functions("masked_fill", "max", "maximum", "clamp", "clip", "clamp_min", "tanh", "nan_to_num", "clone"),
        *functions("amax", "softmax", "to", "type", "type_as", "float", "half", "bfloat16", "double"),
        *(torch.special.softmax, F.softmax, F.softmin),
    }
)
_CHOOSING = frozenset(functions("where"))  # in memory of its own, in an order that the condition decides


@dataclass(frozen=True, eq=False)
class Memory:
    """The memory of a lazy tensor's values.

    Args:
        owner: an object that identifies the memory; tensors with the same object may share memory.
        is_certain: whether tensors with the same object certainly share memory.
        is_contiguous: whether the values are known to be contiguous.
    """

    owner: object
    is_certain: bool = True
    is_contiguous: bool = False

    @classmethod
    def of_product(cls, product: Product) -> Memory:
        """Return the memory of a product; those of einsum and of tensors that torch folds may be in another order."""
        letters = (*product.left_letters, *product.right_letters, *product.letters)
        is_matmul = {"row", "sum", "column"} <= {*letters}
        return cls(object(), is_contiguous=is_matmul and len(product.left_letters) == len(product.right_letters))

    def after(self, func: Callable[..., Any], args: Sequence[Any]) -> Memory:
        """Return the memory of the result of a deferred call that writes to nothing."""
        is_first = bool(args) and isinstance(args[0], Scores)
        if func in _ALLOCATING or func in _CHOOSING:
            return Memory(object(), is_contiguous=self.is_contiguous and is_first and func not in _CHOOSING)
        is_view = func in _VIEWS or (func in _VIEWS_OF_CONTIGUOUS and self.is_contiguous)
        is_ordered = self.is_contiguous and is_view and func not in _MOVING_AXES
        return replace(self, is_certain=self.is_certain and is_view, is_contiguous=is_ordered)
