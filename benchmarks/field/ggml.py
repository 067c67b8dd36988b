"""Attention of llama.cpp on a CPU: operations of its library ggml, called through ctypes in the wheel of xllamacpp."""

from __future__ import annotations

import ctypes
import importlib.util
from collections.abc import Callable
from functools import cache, partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from benchmarks.field.runtimes import check_inputs
from benchmarks.peers.peer import Library, Peer

__all__ = ["GGML", "attend"]

_F32, _F16 = 0, 1  # numbers of enum ggml_type
_PRECISE = 10  # GGML_PREC_F32
_SMALL = 1 << 20  # bytes for headers of tensors and the graph


def attend(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    mask: Tensor,
    *,
    scale: float | None = None,
    softcap: float | None = None,
    sink_logit: Tensor | None = None,
    operation: Callable[..., Any],
) -> Tensor:
    """Run one operation on a graph of its own, with keys and values in float32 and the mask in float16, 0 or -inf."""
    check_inputs(query, key, value, *(() if sink_logit is None else (sink_logit,)))
    lib = _library()
    tensors = [x.detach().contiguous() for x in (query, key, value)]
    additive = torch.zeros(mask.shape, dtype=torch.float16).masked_fill(~mask, -torch.inf)
    scores = query.shape[0] * query.shape[1] * query.shape[2] * (key.shape[2] * 2 + value.shape[3])
    needed = 4 * (sum(x.numel() for x in (*tensors, additive)) + 2 * scores + value.numel()) + _SMALL
    context = lib.ggml_init(_Parameters(needed, None, False))
    try:
        sinks = None if sink_logit is None else _given(context, sink_logit.detach())
        factor = query.shape[3] ** -0.5 if scale is None else scale
        given = [_given(context, x) for x in (*tensors, additive)]
        out = operation(lib, context, *given, sinks, factor, softcap)
        graph = lib.ggml_new_graph(context)
        lib.ggml_build_forward_expand(graph, out)
        if lib.ggml_graph_compute_with_ctx(context, graph, 1) != 0:
            raise RuntimeError("ggml_graph_compute_with_ctx failed")
        result = torch.empty(query.shape[0], query.shape[2], query.shape[1], value.shape[3])
        ctypes.memmove(result.data_ptr(), lib.ggml_get_data(out), 4 * result.numel())
    finally:
        lib.ggml_free(context)
    return result.transpose(1, 2)


def _flash(
    lib: Any, context: int, q: int, k: int, v: int, mask: int, sinks: int | None, scale: float, softcap: float | None
) -> int:
    """Call ``ggml_flash_attn_ext``, which llama.cpp calls with ``--flash-attn``."""
    out: int = lib.ggml_flash_attn_ext(context, q, k, v, mask, scale, 0.0, softcap or 0.0)
    lib.ggml_flash_attn_ext_set_prec(out, _PRECISE)
    if sinks is not None:
        lib.ggml_flash_attn_ext_add_sinks(out, sinks)
    return out


def _softmax(
    lib: Any, context: int, q: int, k: int, v: int, mask: int, sinks: int | None, scale: float, softcap: float | None
) -> int:
    """Call the operations that llama.cpp calls without ``--flash-attn``: two products around ``ggml_soft_max_ext``."""
    if softcap is not None:
        raise NotImplementedError("takes no softcap")
    scores = lib.ggml_mul_mat(context, k, q)
    lib.ggml_mul_mat_set_prec(scores, _PRECISE)
    weights = lib.ggml_soft_max_ext(context, scores, mask, scale, 0.0)
    if sinks is not None:
        lib.ggml_soft_max_add_sinks(weights, sinks)
    turned = lib.ggml_cont(context, lib.ggml_permute(context, v, 1, 0, 2, 3))
    out = lib.ggml_mul_mat(context, turned, weights)
    result: int = lib.ggml_cont(context, lib.ggml_permute(context, out, 0, 2, 1, 3))
    return result


class _Parameters(ctypes.Structure):
    """``struct ggml_init_params``."""

    _fields_ = (("mem_size", ctypes.c_size_t), ("mem_buffer", ctypes.c_void_p), ("no_alloc", ctypes.c_bool))


@cache
def _library() -> Any:
    """Load ggml from the extension module of xllamacpp, without importing the module."""
    package = importlib.util.find_spec("xllamacpp")
    if package is None or not package.submodule_search_locations:
        raise ModuleNotFoundError("xllamacpp is not installed: pip install xllamacpp", name="xllamacpp")
    lib = ctypes.CDLL(str(next(Path(package.submodule_search_locations[0]).glob("xllamacpp*.so"))))
    pointer, number, long = ctypes.c_void_p, ctypes.c_float, ctypes.c_int64
    takes: dict[str, tuple[Any, list[Any]]] = {
        "ggml_init": (pointer, [_Parameters]),
        "ggml_free": (None, [pointer]),
        "ggml_new_tensor_4d": (pointer, [pointer, ctypes.c_int, *[long] * 4]),
        "ggml_get_data": (pointer, [pointer]),
        "ggml_mul_mat": (pointer, [pointer] * 3),
        "ggml_mul_mat_set_prec": (None, [pointer, ctypes.c_int]),
        "ggml_permute": (pointer, [pointer, pointer, *[ctypes.c_int] * 4]),
        "ggml_cont": (pointer, [pointer] * 2),
        "ggml_soft_max_ext": (pointer, [*[pointer] * 3, number, number]),
        "ggml_soft_max_add_sinks": (None, [pointer] * 2),
        "ggml_flash_attn_ext": (pointer, [*[pointer] * 5, *[number] * 3]),
        "ggml_flash_attn_ext_set_prec": (None, [pointer, ctypes.c_int]),
        "ggml_flash_attn_ext_add_sinks": (None, [pointer] * 2),
        "ggml_new_graph": (pointer, [pointer]),
        "ggml_build_forward_expand": (None, [pointer] * 2),
        "ggml_graph_compute_with_ctx": (ctypes.c_int, [pointer, pointer, ctypes.c_int]),
    }
    for name, (result, arguments) in takes.items():
        function = getattr(lib, name)
        function.restype, function.argtypes = result, arguments
    return lib


def _given(context: int, x: Tensor) -> int:
    """Copy a tensor into a new tensor of ggml, whose axes are in the reverse order."""
    sides = [*reversed(x.shape), 1, 1, 1][:4]
    tensor: int = _library().ggml_new_tensor_4d(context, _F16 if x.dtype == torch.float16 else _F32, *sides)
    ctypes.memmove(_library().ggml_get_data(tensor), x.contiguous().data_ptr(), x.numel() * x.element_size())
    return tensor


GGML = Library(
    "ggml",
    "xllamacpp",
    tuple(
        Peer(call, partial(attend, operation=operation), gqa=True, gradients=False, dtype=torch.float32)
        for call, operation in (
            ("ggml_flash_attn_ext(q, k, v, mask)", _flash),
            ("ggml_soft_max_ext(ggml_mul_mat(k, q), mask)", _softmax),
        )
    ),
)
