"""A dry run: every operation with tensors that have shapes and no memory, so that its cost is known before it is run.

Products of attention are asked what their kernel would compute and hold (`AttentionMatrix.explain` says the same);
the other operations of saccade are followed into. What depends on what tensors hold cannot be run dry.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, TypeVar, cast

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode, unset_fake_temporarily
from torch.nn.modules import transformer
from torch.utils._pytree import tree_leaves, tree_map
from torch.utils.flop_counter import flop_registry, sdpa_backward_flop_count, sdpa_flop_count

from saccade.costs.operation import Step
from saccade.engine import custom_op
from saccade.engine.dispatch import route_of
from saccade.engine.explanation import Explanation
from saccade.engine.kernels.kernel import KernelByHand
from saccade.engine.memory_accounting import Watch
from saccade.mechanisms.value_access import taken_as_clean
from saccade.support.errors import unsupported

__all__ = ["DryRun", "dry", "stand_in"]

Result = TypeVar("Result")
_FREE = {"empty", "new_empty", "empty_like", "empty_strided", "device", "detach", "lift_fresh", "_local_scalar_dense"}

_SDPA = "_scaled_dot_product_flash_attention_for_cpu"  # of which torch's own counter knows nothing


class DryRun(Watch):
    """Notes what operations cost while it is switched on, see `dry`.

    Args:
        held: bytes that stay throughout.
        past: tokens that each query of an attention has keys of before its own, as in decoding.

    Attributes:
        steps: what was run.
        most: bytes that tensors held at most.
    """

    def __init__(self, held: int = 0, past: int = 0) -> None:
        super().__init__()
        self.now = self.most = held
        self.steps: list[Step] = []
        self._past = past

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        name = func.name().partition(".")[0]
        if name in ("saccade::product", "saccade::product_backward"):
            made = func(*args, **kwargs)
            self.note(made, (args, kwargs))
            self._attend(args, made, is_backward=name.endswith("backward"))
            return made
        if name not in ("prim::device", "aten::detach"):
            with self:
                made = func.decompose(*args, **kwargs)
            if made is not NotImplemented:
                return made
        own = _python_of(name)
        if own is not None:
            # On the way to its result it takes many steps, and those are taken fastest where there are shapes alone.
            with unset_fake_temporarily():
                alone = tree_map(_shape_alone, args)
                with self:
                    own(*alone, **kwargs)
        made = func(*args, **kwargs)
        self.note(made, (args, kwargs))
        step = None if own else _step(func, args, kwargs, made)
        if step is not None:
            self.steps.append(step)
        return made

    def _attend(self, arguments: Any, made: Any, *, is_backward: bool) -> None:
        with _for_real():
            given, value_dim, dropout_p, impl = custom_op.asked([stand_in(x) for x in arguments])
            if self._past and given.shape[2] == given.shape[3]:
                given = _after(given, self._past)
            route = route_of(given, dropout_p, impl, by_hand=is_backward)
            told = Explanation.of(given, route, value_dim, dropout_p, mask=given.rule)
            extra = told.extra_bytes
            if is_backward:
                extra = cast("KernelByHand", route.kernel).backward_bytes(given, value_dim)
                extra -= sum(x.nbytes for x in made)
        self.touch(extra)
        columns = given.key.shape[2]
        if self._past:  # few queries, which read no more keys than they may see
            columns = min(columns, -(-told.pairs // math.prod(given.shape[:2])))
        of_keys = given.key.shape[0] * given.key.shape[1] * columns * (given.key.shape[3] + value_dim)
        read = (given.query.numel() + of_keys) * given.query.element_size()
        written = sum(x.numel() * x.element_size() for x in made)
        flops = told.flops * 5 // 2 if is_backward else told.flops
        shape = (told.tiles, given.query.shape[3] + value_dim)
        name = f"attention:{told.kernel}"
        if given.tile_function is not None or given.modification is not None:
            name += "/a function of scores"
        dtype = _name_of(given.dtype)
        moved = read * (2 if is_backward else 1) + written
        self.steps.append(Step(name, flops, moved, told.pairs, shape, dtype, is_backward))


@contextmanager
def dry(run: DryRun, mode: FakeTensorMode) -> Iterator[DryRun]:
    """Whatever is run meanwhile costs nothing, and says what it would cost."""
    with mode, _program(True), taken_as_clean(), _layers_of_torch(), run:
        yield run


@contextmanager
def _program(is_one: bool) -> Iterator[None]:
    """As for a compiler: what is run depends on shapes alone, and products of attention are operations."""
    before = torch.compiler._is_compiling_flag
    torch.compiler._is_compiling_flag = is_one
    try:
        yield
    finally:
        torch.compiler._is_compiling_flag = before


@contextmanager
def _layers_of_torch() -> Iterator[None]:
    """Have torch's own layers run step by step, and not read their masks.

    In evaluation, and LSTMs on some processors, they run as one operation, whose products of matrices are not seen. A
    stack of layers reads its mask to see whether it is causal, which decides which kernel runs and not what comes out:
    it is counted as any mask.
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
def _for_real() -> Iterator[None]:
    with unset_fake_temporarily(), _program(False):
        yield


def stand_in(x: Any) -> Any:
    """A true tensor, without memory for each of its numbers, for one that has only a shape; lists of them likewise.

    Of masks every pair is allowed, since nobody knows what they will hold.
    """
    if isinstance(x, list | tuple):
        return [stand_in(each) for each in x]
    if not isinstance(x, FakeTensor):
        return x
    if x.is_floating_point() and x.dim() == 4:
        return torch.empty(1, 1, *x.shape[2:], dtype=x.dtype).expand(x.shape)
    return torch.ones((), dtype=x.dtype).expand(x.shape).contiguous()


def _after(given: Any, past: int) -> Any:
    """The same queries with more keys before their own."""
    batch, heads, q_len, _ = given.shape
    key = torch.empty(1, 1, past + q_len, given.key.shape[3], dtype=given.key.dtype)
    key = key.expand(*given.key.shape[:2], -1, -1)
    return given.replaced(shape=(batch, heads, q_len, past + q_len), key=key, origin=(given.origin[0] + past, 0))


def _shape_alone(x: Any) -> Any:
    if not isinstance(x, Tensor):
        return x
    return torch.empty_strided(x.shape, x.stride(), dtype=x.dtype, device="meta")


def _python_of(name: str) -> Callable[..., Any] | None:
    """What an operation that is written in Python runs; not of one that reads a number to draw what it then keeps."""
    found = None if name == "saccade::drawn_directions" else torch._library.custom_ops.OPDEFS.get(name)
    return None if found is None else found._init_fn


def _step(func: Any, args: Any, kwargs: Any, made: Any) -> Step | None:
    """What an operation costs; None where it only looks at tensors in another way."""
    name = func.overloadpacket.__name__
    product = getattr(torch.ops.aten, name.removesuffix("_"), None)
    given = [x for x in tree_leaves((args, kwargs)) if isinstance(x, Tensor)]
    results = [x for x in tree_leaves(made) if isinstance(x, Tensor)]
    if name in _FREE or not results:
        return None
    known = {id(x.untyped_storage()) for x in given}
    writes = name.endswith("_") or "out" in kwargs
    if not writes and all(id(x.untyped_storage()) in known for x in results):
        return None
    flops, shape = 0, tuple[int, ...]()
    if product in flop_registry:
        options = {key: value for key, value in kwargs.items() if key != "out"}
        flops = int(flop_registry[product](*args, **options, out_val=made))
        shape = _product_shape(name, given, results[0], flops)
    elif name.startswith(_SDPA):
        flops, shape = _attention_on_a_processor(name, args)
    moved = sum(_bytes_of(x) for x in (*given, *results))
    largest = max((x.numel() for x in results), default=0)
    if name in ("sum", "mean", "amax", "amin", "any", "all", "norm", "linalg_vector_norm"):
        largest = max((x.numel() for x in given), default=0)
    return Step(name, flops, moved, largest, shape, _name_of(results[0].dtype))


def _attention_on_a_processor(name: str, args: Any) -> tuple[int, tuple[int, ...]]:
    """Return the operations of torch's attention or of its gradients, and the shape of products with as many."""
    sizes = [x.shape for x in args if isinstance(x, Tensor) and x.dim() == 4]
    if name.endswith("backward"):
        flops, (query, key, value) = sdpa_backward_flop_count(*sizes[:4]), sizes[1:4]
    else:
        flops, (query, key, value) = sdpa_flop_count(*sizes[:3]), sizes[:3]
    return int(flops), (query[0] * query[1], query[2], query[3] + value[3], key[2])


def _product_shape(name: str, given: list[Tensor], made: Tensor, flops: int) -> tuple[int, ...]:
    """(batch, rows, inner, columns) of a matrix product, or of the one that a convolution is."""
    rows, columns = made.shape[-2:] if made.dim() > 1 else (1, made.numel())
    batch = 1
    if name in ("bmm", "baddbmm"):
        batch = made.shape[0]
    elif "convolution" in name:
        rows, columns = max(1, made.numel() // max(1, made.shape[1])), made.shape[1]
    inner = flops // max(1, 2 * batch * rows * columns)
    return batch, int(rows), max(1, inner), int(columns)


def _bytes_of(x: Tensor) -> int:
    """What a tensor holds, repeated numbers once."""
    sizes = (size for size, stride in zip(x.shape, x.stride(), strict=True) if stride or size == 0)
    return math.prod(sizes) * x.element_size()


def _name_of(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def refuse_dry(error: Exception) -> Exception:
    """The error for what cannot be run dry."""
    reason = f"what it runs depends on what its tensors hold: {str(error).splitlines()[0]}"
    return unsupported("subject", [reason], hint="time and measure it with benchmarks of its own")
