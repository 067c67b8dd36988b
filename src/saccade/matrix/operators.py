"""Operators that lazy matrices share with tensors. Other tensor methods raise errors that suggest alternatives."""

from __future__ import annotations

import importlib
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, NoReturn, Self, overload

import torch
from torch import Tensor

from saccade.support.errors import kind, type_error
from saccade.support.torch_modes import is_tracing
from saccade.support.validation import check_type

if TYPE_CHECKING:
    from saccade.matrix.matrix import Matrix

_BUILT = "A.to_dense() builds it, up to a limit"
_PARTS = "A[b, h] is one head, A[b, h, i] a row, A[..., i, j] one weight of each head"
_ASKED = "A.summary(), A.entropy(), A.topk(k), A.received() and A.pooled(bins) work without building it"
_HINTS: Mapping[str, str] = {
    **dict.fromkeys(("T", "t", "transpose", "swapaxes", "permute"), "A.mT is its transpose, for A.mT @ x"),
    **dict.fromkeys(("numpy", "tolist", "detach", "clone", "view", "reshape", "flatten", "squeeze", "item"), _BUILT),
    **dict.fromkeys(("sum", "mean", "std", "var", "max", "min", "amax", "argmax", "sort", "norm", "log"), _ASKED),
    **dict.fromkeys(("cpu", "cuda", "float", "double", "half", "bfloat16", "type"), "A.to(device, dtype)"),
    **dict.fromkeys(
        ("softmax", "masked_fill", "weights", "attn"), f"its weights are already softmaxed and masked; {_BUILT}"
    ),
    **dict.fromkeys(("plot", "show", "imshow", "heatmap"), "saccade.viz.heatmap(A, head=0) draws it"),
    **dict.fromkeys(("size", "dim", "ndim"), "A.shape is (batch, heads, q_len, kv_len)"),
    **dict.fromkeys(("backward", "grad", "requires_grad", "requires_grad_"), "A @ value is differentiable"),
    "values": "a matrix contains only queries and keys; pass the values to A @ value",
    "logits": "A.scores",
}
_PRODUCTS = (torch.matmul, torch.bmm, Tensor.matmul, Tensor.__matmul__, Tensor.__rmatmul__)
_TIMES = (torch.mul, torch.multiply, Tensor.mul, Tensor.__mul__, Tensor.__rmul__)


class Operators:
    """Operators of a matrix: ``A @ v``, ``v @ A``, ``A1 @ A2``, ``A1 - c * A2``, ``A * G``, ``torch.matmul(A, v)``."""

    if TYPE_CHECKING:
        shape: Any
        matmul: Callable[..., Tensor]
        rmatmul: Callable[[Tensor], Tensor]
        to_dense: Callable[..., Tensor]

    @overload
    def __matmul__(self, other: Tensor) -> Tensor: ...
    @overload
    def __matmul__(self, other: Matrix) -> Matrix: ...
    def __matmul__(self, other: Any) -> Any:
        return _combined("Chain", self, other) if isinstance(other, Operators) else self.matmul(other)

    def __rmatmul__(self, x: Tensor) -> Tensor:
        """Return ``x @ A``, ``[batch, heads, width, kv_len]``, for ``x [batch, heads, width, q_len]``."""
        return self.rmatmul(check_type("x", x, Tensor, "be a tensor").mT).mT

    def __add__(self, other: Matrix) -> Matrix:
        return _combined("Sum", (1.0, self), (1.0, _checked_matrix(other, "+")))

    def __sub__(self, other: Matrix) -> Matrix:
        return _combined("Sum", (1.0, self), (-1.0, _checked_matrix(other, "-")))

    def __mul__(self, factor: float | Tensor | Matrix) -> Matrix:
        if isinstance(factor, Operators):
            return _combined("ElementwiseProduct", self, factor, module="gradient_matrix")
        return _combined("Sum", (factor, self))

    __rmul__ = __mul__

    def __truediv__(self, divisor: float | Tensor) -> Matrix:
        return _combined("Sum", (1.0 / divisor, self))

    def __neg__(self) -> Matrix:
        return _combined("Sum", (-1.0, self))

    def __radd__(self, other: object) -> Self:
        """Return the matrix itself for ``0 + A``, the first step of ``sum(matrices)``. Other terms raise an error."""
        return self if isinstance(other, int) and other == 0 else _refuse_term(other)

    def __rsub__(self, other: object) -> NoReturn:
        _refuse_term(other)

    __array_ufunc__ = None  # a NumPy number times a matrix calls the matrix's operator

    def __len__(self) -> int:
        size: int = self.shape[0]
        return size

    def __array__(self, dtype: Any = None, copy: bool | None = None) -> Any:
        """Return all weights as a NumPy array, up to the limit of `to_dense`."""
        dense = self.to_dense().detach().cpu().numpy()
        return dense if dtype is None else dense.astype(dtype)

    if not TYPE_CHECKING:  # for type checkers, every attribute would exist

        def __getattr__(self, name: str) -> NoReturn:
            hint = _HINTS.get(name)
            message = f"{type(self).__name__}: attribute must be one of a lazy matrix; got {name}."
            raise AttributeError(message if hint is None else f"{message}\nHint: {hint}", name=name, obj=self)

    @classmethod
    def __torch_function__(
        cls, function: Any, types: Sequence[type], args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        # A compiler passes both operands of an operator in either order.
        if not kwargs and len(args) == 2 and not is_tracing():
            left, right = reversed(args) if function in (Tensor.__rmatmul__, Tensor.__rmul__) else args
            if function in _PRODUCTS:
                return left @ right if isinstance(left, Operators) else right.__rmatmul__(left)
            if function in _TIMES:
                return left * right if isinstance(left, Operators) else right * left
        name = getattr(function, "__name__", "function")
        matrix_type = next(iter(types)).__name__
        hint = f"{_HINTS.get(name, _ASKED)}; {_PARTS if name not in _HINTS else _BUILT}"
        raise type_error("an argument", "be a tensor", f"a lazy {matrix_type}", hint=hint, where=f"torch's {name}")


def _combined(name: str, *parts: Any, module: str = "algebra") -> Matrix:
    # Imported here, because these classes are subclasses of Matrix.
    matrix: Matrix = getattr(importlib.import_module(f"saccade.matrix.{module}"), name)(*parts)
    return matrix


def _checked_matrix(other: object, sign: str) -> Any:
    if not isinstance(other, Operators):
        hint = "to add to the scores, pass bias=; to add to the weights, use the tensor A.to_dense()"
        raise type_error(f"an operand of {sign}", "be a matrix", kind(other), hint=hint)
    return other


def _refuse_term(other: object) -> NoReturn:
    _checked_matrix(other, "+ or -")
    raise AssertionError  # unreachable
