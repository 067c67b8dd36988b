"""Predicate: a mask defined by a user's function."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable

import numpy as np
import torch
from torch import Tensor

from saccade.masks.mask import Mask
from saccade.support.errors import kind, type_error


@dataclasses.dataclass(frozen=True)
class Predicate(Mask):
    """A mask defined by a function ``(b, h, q, kv) -> bool`` of broadcasting tensors (FlexAttention's ``mask_mod``).

    The mask is exact, but since its structure is unknown, all pairs are computed, a few rows at a time.

    >>> print(Predicate(lambda b, h, q, kv: (q + kv) % 2 == 0).picture(3))
    1 . 1
    . 1 .
    1 . 1

    Args:
        function: a function of int64 tensors; the result may depend on the batch item and the head.

    Raises:
        TypeError: the function is not callable or is a class; or, when called, it returns neither a bool tensor nor a
            bool.
    """

    function: Callable[[Tensor, Tensor, Tensor, Tensor], Tensor]
    is_value = False  # the data that the function reads may change between two calls
    calls_functions = True

    def __post_init__(self) -> None:
        if not callable(self.function) or isinstance(self.function, type):
            rule = "be callable as (b, h, q, kv) -> bool"
            raise type_error("function", rule, kind(self.function))

    def __repr__(self) -> str:
        return f"Predicate({getattr(self.function, '__name__', type(self.function).__name__)})"

    def allows(self, b: Tensor, h: Tensor, q: Tensor, kv: Tensor) -> Tensor:
        answer = self.function(b, h, q, kv)
        if isinstance(answer, bool | np.bool_):  # the same for all pairs, as in masks for single layers
            return (q == q) & (kv == kv) if answer else (q != q) & (kv != kv)
        if not isinstance(answer, Tensor) or answer.dtype != torch.bool:
            got = str(answer.dtype).removeprefix("torch.") if isinstance(answer, Tensor) else kind(answer)
            hint = "a comparison of q and kv is bool; (q == q) is true everywhere"
            raise type_error("function", "return a bool tensor, True = may attend", got, hint=hint)
        return answer
