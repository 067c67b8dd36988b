"""Dry runs: run every operation on tensors that have shapes but no memory, and record its cost.

The cost of multiplying an attention matrix by values is the forecast of its kernel, which `AttentionMatrix.explain`
also reports. All other operations of saccade run one by one. A dry run is impossible for programs that depend on the
values of tensors.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple, cast

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode, unset_fake_temporarily
from torch.nn.modules import transformer
from torch.utils._pytree import tree_leaves, tree_map
from torch.utils.flop_counter import flop_registry, sdpa_backward_flop_count, sdpa_flop_count

from saccade.engine import custom_op
from saccade.engine.bias.decay_sums import DecayTerm
from saccade.engine.dispatch import choose_kernel
from saccade.engine.explanation import Explanation
from saccade.engine.kernels.kernel import KernelWithBackward
from saccade.engine.memory_accounting import Watch
from saccade.mechanisms.readable_tensors import assuming_finite
from saccade.support.errors import unsupported

_FREE = {"empty", "new_empty", "empty_like", "empty_strided", "device", "detach", "lift_fresh", "_local_scalar_dense"}

_SDPA = "_scaled_dot_product_flash_attention_for_cpu"  # missing in torch's FLOP counter


class Operation(NamedTuple):
    """An operation recorded in a dry run, with its cost.

    Attributes:
        name: name of the operation, such as ``"mm"``; for an attention product, ``"attention:"`` and its kernel.
        flops: floating-point operations of matrix products; 0 for other operations.
        moved: bytes read and written, each tensor once.
        size: number of elements in the result, or of query-key pairs in an attention product.
        shape: ``(batch, rows, inner, columns)`` for a matrix product, ``(tiles, width)`` for an attention product with
            width head_dim + value_dim, empty for other operations.
        dtype: dtype of the tensors, such as ``"float32"``.
        is_backward: whether it computes the gradients of an attention product.
    """

    name: str
    flops: int
    moved: int
    size: int
    shape: tuple[int, ...] = ()
    dtype: str = "float32"
    is_backward: bool = False

    @property
    def kernel(self) -> str | None:
        """The kernel of an attention product; None for other operations."""
        return self.name.partition(":")[2] or None


class DryRun(Watch):
    """A torch dispatch mode that records the cost of every operation without computing it; see `dry`.

    Args:
        held: bytes that are allocated throughout the run.
        past: number of cached tokens before the queries of attention, as in decoding.

    Attributes:
        steps: the recorded operations, in order.
        most: peak number of bytes allocated by tensors.
    """

    def __init__(self, held: int = 0, past: int = 0) -> None:
        super().__init__()
        self.now = self.most = held
        self.steps: list[Operation] = []
        self._past = past

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        name = func.name().partition(".")[0]
        if name in ("saccade::product", "saccade::product_backward"):
            result = func(*args, **kwargs)
            self.note(result, (args, kwargs))
            self._attend(args, result, is_backward=name.endswith("backward"))
            return result
        if name not in ("prim::device", "aten::detach"):
            with self:
                result = func.decompose(*args, **kwargs)
            if result is not NotImplemented:
                return result
        body = _python_of(name)
        if body is not None:
            # The body runs many operations, and meta tensors are faster than fake tensors.
            with unset_fake_temporarily():
                shapes = tree_map(_to_meta, args)
                with self:
                    body(*shapes, **kwargs)
        result = func(*args, **kwargs)
        self.note(result, (args, kwargs))
        step = None if body else _operation(func, args, kwargs, result)
        if step is not None:
            self.steps.append(step)
        return result

    def _attend(self, arguments: Any, results: Any, *, is_backward: bool) -> None:
        """Record an attention product or its gradients, with the cost forecast by its kernel."""
        with _real_tensors():
            inputs, value_dim, request = custom_op.operator_inputs([without_values(x) for x in arguments])
            if self._past and inputs.shape[2] == inputs.shape[3]:
                inputs = _with_past_keys(inputs, self._past)
            inputs = _with_sums(inputs)
            request = request._replace(needs_backward=is_backward)
            kernel = choose_kernel(inputs, request)
            explained = Explanation.of(inputs, kernel, value_dim, request, mask=inputs.rule)
            extra = explained.extra_bytes
            if is_backward:
                extra = cast("KernelWithBackward", kernel).backward_bytes(inputs, value_dim)
                extra -= sum(x.nbytes for x in results)
        self.touch(extra)
        columns = inputs.key.shape[2]
        if self._past:  # if there are few queries, they read only the keys that they may attend to
            columns = min(columns, -(-explained.pairs // math.prod(inputs.shape[:2])))
        of_keys = inputs.key.shape[0] * inputs.key.shape[1] * columns * (inputs.key.shape[3] + value_dim)
        read = (inputs.query.numel() + of_keys) * inputs.query.element_size()
        written = sum(x.numel() * x.element_size() for x in results)
        flops = explained.flops * 5 // 2 if is_backward else explained.flops
        shape = (explained.tiles, inputs.query.shape[3] + value_dim)
        name = f"attention:{explained.kernel}"
        if inputs.tile_function is not None or inputs.modification is not None:
            name += "/a function of scores"
        dtype = _name_of(inputs.dtype)
        moved = read * (2 if is_backward else 1) + written
        self.steps.append(Operation(name, flops, moved, explained.pairs, shape, dtype, is_backward))


@contextmanager
def dry(run: DryRun, mode: FakeTensorMode) -> Iterator[DryRun]:
    """Run the body of a ``with`` statement as a dry run: nothing is computed, and ``run`` records the costs."""
    with mode, _compiling_flag(True), assuming_finite(), _layers_of_torch(), run:
        yield run


@contextmanager
def _compiling_flag(value: bool) -> Iterator[None]:
    """Set torch's compiling flag within the block; if True, code reads only shapes, and attention is a custom op."""
    before = torch.compiler._is_compiling_flag
    torch.compiler._is_compiling_flag = value
    try:
        yield
    finally:
        torch.compiler._is_compiling_flag = before


@contextmanager
def _layers_of_torch() -> Iterator[None]:
    """Make torch's layers run as separate operations within the block, without reading the values of their masks.

    In evaluation mode, and for LSTMs on some processors, a layer runs as one operation that hides its matrix products.
    A stack of layers reads its mask to detect a causal mask, which changes the kernel but not the result.
    """
    reads, is_fast = transformer._detect_is_causal_mask, torch.backends.mha.get_fastpath_enabled()
    has_mkldnn = torch._C._get_mkldnn_enabled()
    transformer._detect_is_causal_mask = lambda mask, is_causal=None, size=None: is_causal is True
    torch.backends.mha.set_fastpath_enabled(False)
    torch._C._set_mkldnn_enabled(False)
    try:
        yield
    finally:
        transformer._detect_is_causal_mask = reads
        torch.backends.mha.set_fastpath_enabled(is_fast)
        torch._C._set_mkldnn_enabled(has_mkldnn)


@contextmanager
def _real_tensors() -> Iterator[None]:
    with unset_fake_temporarily(), _compiling_flag(False):
        yield


def without_values(x: Any) -> Any:
    """Replace a fake tensor, or each fake tensor in a list, by a real tensor with arbitrary values.

    Boolean masks become True everywhere, because their values are unknown.
    """
    if isinstance(x, list | tuple):
        return [without_values(each) for each in x]
    if not isinstance(x, FakeTensor):
        return x
    if x.is_floating_point() and x.dim() == 4:
        return torch.empty(1, 1, *x.shape[2:], dtype=x.dtype).expand(x.shape)
    return torch.ones((), dtype=x.dtype).expand(x.shape).contiguous()


def _with_past_keys(inputs: Any, past: int) -> Any:
    """Prepend ``past`` cached keys to attention inputs, for a dry run of decoding."""
    batch, heads, q_len, _ = inputs.shape
    key = torch.empty(1, 1, past + q_len, inputs.key.shape[3], dtype=inputs.key.dtype)
    key = key.expand(*inputs.key.shape[:2], -1, -1)
    return inputs.replaced(shape=(batch, heads, q_len, past + q_len), key=key, origin=(inputs.origin[0] + past, 0))


def _with_sums(inputs: Any) -> Any:
    """Extend the decay bias of attention inputs, if any, to a cumulative decay for each key, including cached keys."""
    bias, (_, _, q_len, kv_len) = inputs.bias, inputs.shape
    if not isinstance(bias, DecayTerm):
        return inputs
    sums = torch.zeros((), dtype=bias.source.dtype).expand(*bias.source.shape[:3], kv_len)
    return inputs.replaced(bias=DecayTerm(sums, torch.zeros(1, q_len, dtype=torch.int64), bias.dtype))


def _to_meta(x: Any) -> Any:
    if not isinstance(x, Tensor):
        return x
    return torch.empty_strided(x.shape, x.stride(), dtype=x.dtype, device="meta")


def _python_of(name: str) -> Callable[..., Any] | None:
    """Return the Python body of a custom operation, or None if it has none or the body reads tensor values."""
    definition = None if name == "saccade::drawn_directions" else torch._library.custom_ops.OPDEFS.get(name)
    return None if definition is None else definition._init_fn


def _operation(func: Any, args: Any, kwargs: Any, result: Any) -> Operation | None:
    """Return an operation with its cost, as recorded in a dry run, or None if it only returns views."""
    name = func.overloadpacket.__name__
    product = getattr(torch.ops.aten, name.removesuffix("_"), None)
    inputs = [x for x in tree_leaves((args, kwargs)) if isinstance(x, Tensor)]
    results = [x for x in tree_leaves(result) if isinstance(x, Tensor)]
    if name in _FREE or not results:
        return None
    known = {id(x.untyped_storage()) for x in inputs}
    writes = name.endswith("_") or "out" in kwargs
    if not writes and all(id(x.untyped_storage()) in known for x in results):
        return None
    flops, shape = 0, tuple[int, ...]()
    if product in flop_registry:
        options = {key: value for key, value in kwargs.items() if key != "out"}
        flops = int(flop_registry[product](*args, **options, out_val=result))
        shape = _product_shape(name, results[0], flops)
    elif name.startswith(_SDPA):
        flops, shape = _cpu_attention(name, args)
    moved = sum(_bytes_of(x) for x in (*inputs, *results))
    largest = max((x.numel() for x in results), default=0)
    if name in ("sum", "mean", "amax", "amin", "any", "all", "norm", "linalg_vector_norm"):
        largest = max((x.numel() for x in inputs), default=0)
    return Operation(name, flops, moved, largest, shape, _name_of(results[0].dtype))


def _cpu_attention(name: str, args: Any) -> tuple[int, tuple[int, ...]]:
    """Return the FLOPs of torch's attention or of its gradients, and the shape of the equivalent matrix products."""
    sizes = [x.shape for x in args if isinstance(x, Tensor) and x.dim() == 4]
    if name.endswith("backward"):
        flops, (query, key, value) = sdpa_backward_flop_count(*sizes[:4]), sizes[1:4]
    else:
        flops, (query, key, value) = sdpa_flop_count(*sizes[:3]), sizes[:3]
    return int(flops), (query[0] * query[1], query[2], query[3] + value[3], key[2])


def _product_shape(name: str, result: Tensor, flops: int) -> tuple[int, ...]:
    """Return (batch, rows, inner, columns) of a matrix product, or of the product equivalent to a convolution."""
    rows, columns = result.shape[-2:] if result.dim() > 1 else (1, result.numel())
    batch = 1
    if name in ("bmm", "baddbmm"):
        batch = result.shape[0]
    elif "convolution" in name:
        rows, columns = max(1, result.numel() // max(1, result.shape[1])), result.shape[1]
    inner = flops // max(1, 2 * batch * rows * columns)
    return batch, int(rows), max(1, inner), int(columns)


def _bytes_of(x: Tensor) -> int:
    """Return the bytes of a tensor in a dry run; an expanded axis counts as size 1."""
    sizes = (size for size, stride in zip(x.shape, x.stride(), strict=True) if stride or size == 0)
    return math.prod(sizes) * x.element_size()


def _name_of(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def unsupported_dry_run(error: Exception) -> Exception:
    """Return the error to raise for a program that does not support a dry run."""
    reason = f"its operations depend on the values of its tensors: {str(error).splitlines()[0]}"
    return unsupported("subject", [reason], hint="run it, and measure its time and memory")
