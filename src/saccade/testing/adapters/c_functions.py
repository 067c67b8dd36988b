"""The adapter for functions in a shared library, which are called through ``ctypes`` with pointers and sizes."""

from __future__ import annotations

import ctypes
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from saccade.support.errors import value_error
from saccade.support.language import Message
from saccade.support.validation import check_choice
from saccade.testing.adapters.calling_convention import Form

_DTYPES = {"float32": torch.float32, "float64": torch.float64}


def c_function(
    library: str | Path | ctypes.CDLL, name: str, dtype: str = "float32", *, backward: str | None = None
) -> Form:
    """Adapt a C function, or a C++ function declared ``extern "C"``, in a shared library.

    The function takes pointers to contiguous arrays ``[batch, heads, len, dim]`` and sizes, and must return 0::

        int attention(const float *query, const float *key, const float *value, const uint8_t *mask, float *out,
                      const int64_t *sizes, double scale);

    The mask is ``[batch, heads, q_len, kv_len]``, 1 = may attend; ``out`` is filled with NaN before the call. The
    sizes are batch, heads, kv_heads, q_len, kv_len, head_dim and value_dim. A return value other than 0 is an error.
    The backward function has the same arguments with ``const float *out, const float *grad_out, float *grad_query,
    float *grad_key, float *grad_value`` in place of ``out``.

    Args:
        library: path of the library, or a library loaded with ``ctypes.CDLL``.
        name: name of the function.
        dtype: "float32" for ``float``, "float64" for ``double``.
        backward: name of the function for the backward pass; None if there is none.

    Raises:
        ValueError: the library cannot be loaded, or has no such function.
    """
    check_choice("dtype", dtype, tuple(_DTYPES))
    try:
        loaded = library if isinstance(library, ctypes.CDLL) else ctypes.CDLL(str(Path(library).resolve()))
    except OSError as error:
        raise value_error("library", "be a shared library", str(error)) from None
    for argument, symbol in (("name", name), ("backward", backward)):
        if symbol is not None and not hasattr(loaded, symbol):
            raise value_error(argument, "be a function of the library", repr(symbol))
    settings = {"name": name, "dtype": dtype, "backward": backward}
    return Form(
        loaded, run, _reasons_against, settings, ("scale",), gradients=backward is not None, parts=(CCall, call_c)
    )


def run(
    kernel: Any,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    mask: Tensor,
    *,
    name: str,
    dtype: str,
    backward: str | None,
    scale: float | None = None,
) -> Tensor:
    """Call the C function on contiguous copies of the inputs, and return its output."""
    factor = query.shape[3] ** -0.5 if scale is None else scale
    inputs = [x.contiguous() for x in (query, key, value, mask.to(torch.uint8))]
    pull_back = None if backward is None else getattr(kernel, backward)
    out: Tensor = CCall.apply(getattr(kernel, name), pull_back, *inputs, factor)
    return out


def call_c(kernel: Any, inputs: list[Tensor], outputs: list[Tensor], scale: float) -> None:
    """Call a C function with pointers to inputs and outputs, sizes and scale; raise an error unless it returns 0."""
    query, key, value = inputs[:3]
    batch, heads, q_len, head_dim = query.shape
    counts = (batch, heads, key.shape[1], q_len, key.shape[2], head_dim, value.shape[3])
    sizes = (ctypes.c_int64 * len(counts))(*counts)
    kernel.restype = ctypes.c_int
    pointers = [ctypes.c_void_p(x.data_ptr()) for x in (*inputs, *outputs)]
    status = kernel(*pointers, sizes, ctypes.c_double(scale))
    if status:
        raise RuntimeError(f"the C function returned {status}")


class CCall(torch.autograd.Function):
    """An autograd function that calls one C function in the forward pass and another in the backward pass."""

    @staticmethod
    def forward(
        ctx: Any, kernel: Any, backward: Any, query: Tensor, key: Tensor, value: Tensor, mask: Tensor, scale: float
    ) -> Tensor:
        """Allocate the output, and fill it by calling the C function."""
        out = torch.full((*query.shape[:3], value.shape[3]), torch.nan, dtype=query.dtype)
        call_c(kernel, [query, key, value, mask], [out], scale)
        ctx.save_for_backward(query, key, value, mask, out)
        ctx.backward_function, ctx.scale = backward, scale
        return out

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        """Return the gradients of query, key and value, computed by the backward C function."""
        query, key, value, mask, out = ctx.saved_tensors
        changes = [torch.full_like(x, torch.nan) for x in (query, key, value)]
        call_c(ctx.backward_function, [query, key, value, mask, out, grads[0].contiguous()], changes, ctx.scale)
        return None, None, *changes, None, None


def _reasons_against(
    query: Tensor, key: Tensor, value: Tensor, mask: Tensor, *, name: str, dtype: str, backward: object
) -> tuple[str, ...]:
    """Return the reasons why the C function cannot take the inputs; empty if it can."""
    reasons: list[str] = []
    tensors = (query, key, value)
    if any(x.dtype != _DTYPES[dtype] or x.device.type != "cpu" for x in tensors):
        reasons.append(Message("takes {dtype} only on the CPU", dtype=dtype))
    if backward is None and torch.is_grad_enabled() and any(x.requires_grad for x in tensors):
        reasons.append("has no gradients")
    return tuple(reasons)
