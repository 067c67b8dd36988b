"""Microbenchmarks: small cases of each kind of operation, timed to estimate the speed of a machine."""

from __future__ import annotations

import itertools
import time
from collections import deque
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, cast

import torch
from torch import Tensor

from saccade.engine.dispatch import choose_kernel
from saccade.engine.inputs import AttentionInputs
from saccade.engine.kernels.kernel import Request
from saccade.masks import Causal, Mask, Window
from saccade.matrix import Impl, attention
from saccade.mechanisms import Delta

SIZES = (32, 128)
"""Head widths at which kernels are timed; other widths are interpolated."""
_LENGTH = 1024
_COUNTS = (1 << 10, 1 << 14, 1 << 18, 1 << 22)
_BYTES = (1 << 12, 1 << 16, 1 << 20, 1 << 23, 1 << 26, 1 << 28)
_SINGLE = (
    *((1, rows, inner, columns) for rows in (1, 64, 1024) for inner, columns in ((128, 128), (512, 512), (512, 2048))),
    *((1, 1024, 2048, 512), (1, 512, 1024, 512), (1, 128, 4096, 128), (1, 4096, 128, 128), (1, 1024, 1024, 1024)),
    (1, 256, 256, 8192),
)
_BATCHED = (
    (16, 64, 64, 64),
    (16, 16, 64, 64),
    (8, 256, 64, 256),
    (8, 1024, 64, 1024),
    (8, 64, 1024, 64),
    (8, 1, 64, 512),
)

_SAMPLE_SECONDS, _MIN_SAMPLES, _TOTAL_SECONDS = 0.002, 7, 0.15

_aten: Any = torch.ops.aten


def _rows(x: Tensor) -> Tensor:
    return x.view(-1, 256)


def _twice(run: Callable[[Tensor, Tensor], object], x: Tensor) -> object:
    return run(x, x)


ELEMENTWISE: dict[str, Callable[[Tensor], Any]] = {
    **{
        name: getattr(_aten, name)
        for name in ("exp", "log", "sin", "cos", "tanh", "sigmoid", "erf", "silu", "gelu", "rsqrt", "sum", "mean")
    },
    "pow": lambda x: _aten.pow(x, 2),
    **{
        name: partial(_twice, getattr(_aten, name))
        for name in ("silu_backward", "gelu_backward", "tanh_backward", "sigmoid_backward")
    },
    "_softmax": lambda x: _aten._softmax(_rows(x), -1, False),
    "_log_softmax": lambda x: _aten._log_softmax(_rows(x), -1, False),
    "_softmax_backward_data": lambda x: _aten._softmax_backward_data(_rows(x), _rows(x), -1, x.dtype),
    "_log_softmax_backward_data": lambda x: _aten._log_softmax_backward_data(_rows(x), _rows(x), -1, x.dtype),
    "native_layer_norm": lambda x: _aten.native_layer_norm(_rows(x), [256], _rows(x)[0], _rows(x)[0], 1e-5),
    "native_layer_norm_backward": lambda x: _layer_norm_backward(_rows(x)),
    "scatter_add": lambda x: _aten.scatter_add(x, 0, torch.arange(len(x)), x),
    "elu": _aten.elu,
    "native_dropout": lambda x: _aten.native_dropout(x, 0.1, True),
    "bernoulli_": lambda x: torch.empty_like(x).bernoulli_(0.9),
}
"""Elementwise and row-wise operations whose time is limited by arithmetic, not by memory bandwidth."""


def _layer_norm_backward(x: Tensor) -> object:
    wide = torch.float32 if x.dtype in (torch.bfloat16, torch.float16) else x.dtype
    statistic = torch.zeros(len(x), 1, dtype=wide)
    return _aten.native_layer_norm_backward(x, x, [x.shape[1]], statistic, statistic, x[0], x[0], [True, True, True])


def timed(run: Callable[[], object]) -> float:
    """Time a call in seconds: the minimum of many short samples, because disturbances can only prolong a sample."""
    run()
    start = time.perf_counter()
    run()
    once = max(1e-7, time.perf_counter() - start)
    times: list[float] = []
    repeats = max(1, min(1000, int(_SAMPLE_SECONDS / once)))
    end = time.perf_counter() + _TOTAL_SECONDS
    while len(times) < _MIN_SAMPLES or time.perf_counter() < end:
        start = time.perf_counter()
        for _ in range(repeats):
            run()
        times.append((time.perf_counter() - start) / repeats)
    return min(times)


def small_operations() -> Tensor:
    """Run many small operations from Python, those of a recurrence in chunks, so that their overhead can be timed."""
    query, key, value = torch.ones(1, 4, 512, 32), torch.full((1, 4, 512, 32), 0.1), torch.ones(1, 4, 512, 32)
    return Delta()(query, key, mask=Causal()) @ value


def streams() -> list[list[float]]:
    """Measure the memory bandwidth: ``[bytes moved, seconds]`` for sums of two tensors."""
    samples = []
    for moved in _BYTES:
        pairs = [(torch.ones(moved // 12), torch.ones(moved // 12)) for _ in range(4)]
        samples.append([float(moved), timed(_in_turns(torch.add, pairs))])
    return samples


def _in_turns(run: Callable[..., Tensor], inputs: Sequence[tuple[Tensor, ...]]) -> Callable[[], None]:
    """Return a function to time that cycles through the inputs, so that none of them is in the CPU cache."""
    turns, results = itertools.cycle(inputs), deque[Tensor](maxlen=8)
    return lambda: results.append(run(*next(turns)))


def elementwise(name: str, dtype: str) -> list[list[float]]:
    """Measure an elementwise operation: ``[elements, seconds]`` for several sizes."""
    run = ELEMENTWISE[name]
    inputs = [torch.rand(4, count).add_(0.1).to(getattr(torch, dtype)) for count in _COUNTS]
    return [[float(x.shape[1]), timed(_in_turns(run, [(each,) for each in x]))] for x in inputs]


def products(kind: str, dtype: str) -> list[list[float]]:
    """Measure matrix products: ``[batch, rows, inner, columns, FLOP/s]`` for several shapes."""
    samples = []
    for batch, rows, inner, columns in _BATCHED if kind == "batched" else _SINGLE:
        a, b = (torch.rand(batch, *shape).to(getattr(torch, dtype)) for shape in ((rows, inner), (inner, columns)))
        seconds = timed(lambda a=a, b=b: torch.bmm(a, b) if kind == "batched" else torch.mm(a[0], b[0]))  # type: ignore[misc]
        samples.append([batch, rows, inner, columns, 2 * batch * rows * inner * columns / seconds])
    return samples


def attention_samples(kernel: str, dtype: str, *, is_backward: bool) -> list[list[float]]:
    """Time attention products, or their gradients, with one kernel.

    Returns:
        Four times in seconds, each as ``[seconds]``: the startup, a query-key pair at each head width in `SIZES`, and
        an additional tile.
    """
    start = _attention(kernel, dtype, 16, SIZES[0], Causal(), is_backward=is_backward)
    pairs = []
    for width in SIZES:
        time, count, _ = _attention(kernel, dtype, _LENGTH, width, Causal(), is_backward=is_backward)
        pairs.append(max(0.0, time - start[0]) / max(1, count))
    time, count, tiles = _attention(kernel, dtype, 4 * _LENGTH, 64, Window(_LENGTH // 16, 0), is_backward=is_backward)
    pair = pairs[0] + (pairs[1] - pairs[0]) * (64 - SIZES[0]) / (SIZES[1] - SIZES[0])
    tile = max(0.0, time - start[0] - count * pair) / max(1, tiles - 1)
    return [[start[0]], [pairs[0]], [pairs[1]], [tile]]


def _attention(
    kernel: str, dtype: str, length: int, width: int, mask: Mask, *, is_backward: bool
) -> tuple[float, int, int]:
    """Return the seconds, pairs and tiles of an attention product or its gradients."""
    tensors = [torch.randn(1, 4, length, width).to(getattr(torch, dtype)) for _ in range(3)]
    inputs = AttentionInputs.of(tensors[0], tensors[1], mask)
    cost = choose_kernel(inputs, Request(impl=kernel)).cost(inputs, width, 0.0)

    def forward() -> Tensor:
        query, key, value = tensors
        return attention(query, key, value, mask=mask, impl=cast("Impl", kernel))

    if not is_backward:
        return timed(forward), cost.pairs, cost.tiles
    tensors = [x.requires_grad_() for x in tensors]
    result = forward()
    grad = torch.ones_like(result)
    return (
        timed(lambda: torch.autograd.grad(result, tensors, grad, retain_graph=True)),
        cost.pairs,
        cost.tiles,
    )
