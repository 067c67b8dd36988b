"""FuseAttention: while a model runs, fuse attention that it computes with separate operations."""

from __future__ import annotations

import functools
import math
import threading
import weakref
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import replace
from operator import itemgetter
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F
from torch.overrides import TorchFunctionMode

from saccade.fusion.arguments import map_nested, tensors_in, writes
from saccade.fusion.checkpoints import Context, enter_when_recomputed
from saccade.fusion.lazy import (
    METADATA,
    Family,
    LazyTensor,
    Operation,
    Pending,
    dispatch_keys,
    materialised,
    with_placeholders,
)
from saccade.fusion.memory import Memory
from saccade.fusion.operations import scores_after
from saccade.fusion.product_spellings import PRODUCTS, product_of, scores_of
from saccade.fusion.recovered_call import AttentionCall, Output, attention_call
from saccade.fusion.repeated_heads import REPEAT_FUNCTIONS, Repeats
from saccade.fusion.row_maximum import RowMaximum
from saccade.fusion.scores import Scores, is_dense
from saccade.fusion.softmax_tap import Arrange, SoftmaxTap
from saccade.fusion.written_softmax import Exponentials, OfScores, RowArgmax
from saccade.matrix import Matrix
from saccade.support.torch_modes import has_forward_derivatives, in_backward, is_recorded, is_transformed

Run = Callable[[AttentionCall], Tensor | None]
"""A function that returns the output of an attention call, ``[batch, heads, q_len, value_dim]``.

If it returns None, the model's own code computes the call.
"""


class FuseAttention(TorchFunctionMode):
    """A mode in which attention written as matmul, softmax and matmul runs as a single attention call.

    Products of two tensors are not computed when the model calls them. Instead, the operations on them are recorded:
    scaling, masks, biases, casts, views, a softmax, dropout; see `saccade.fusion.operations`. When the weights are
    multiplied by values, the attention call is run, and scores and weights are never materialised. Any other use
    computes them with the model's own operations, so the results of a model without attention are bitwise identical.

    Args:
        run: computes the output of an attention call, by default with saccade.
        on_attention: called with each attention call that ``run`` has computed.
        on_weights: called with the weights ``[batch, heads, q_len, kv_len]`` of each softmax that the model multiplies
            by values, but that cannot run as an attention call. Dropout, casts, views and elementwise changes may come
            before the product.
        on_unknown: called for each product with any other tensor derived from a softmax, such as a slice of the
            weights; used only together with ``on_weights``.

    Gradients, autocast, checkpoints and inference mode work as in the model. Nothing is fused within
    ``torch.compile``, ``torch.func``, forward-mode derivatives or tracing. If weights are read after they have been
    multiplied by values, they are computed a second time. In autograd, the output does not depend on this copy, and
    its dropout differs.

    Example:
        >>> q = k = v = torch.ones(1, 2, 4, 8)
        >>> with FuseAttention(on_attention=lambda call: print(call.matrix().shape)):
        ...     out = torch.softmax(q @ k.mT / 8**0.5, -1) @ v
        (1, 2, 4, 4)
    """

    def __init__(
        self,
        run: Run = AttentionCall.run,
        *,
        on_attention: Callable[[AttentionCall], None] | None = None,
        on_weights: Callable[[Tensor], None] | None = None,
        on_unknown: Callable[[], None] = lambda: None,
    ):
        super().__init__()
        self._run, self._on_attention = run, on_attention
        self._tap = None if on_weights is None else SoftmaxTap(_report_arranged(on_weights), on_unknown)
        self._repeats, self._thread = Repeats(), _ThreadState()
        self._allow_non_finite = False  # NaN and inf are left to the model's code
        self._families: weakref.WeakSet[Family] = weakref.WeakSet()

    def __exit__(self, exc_type: Any, exc_value: Any, traceback: Any) -> None:
        """Compute the lazy tensors still in use, because later writes to their operands would go undetected."""
        super().__exit__(exc_type, exc_value, traceback)
        if exc_type is None:
            for family in list(self._families):
                family.compute()

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if torch.compiler.is_compiling() or (in_backward() and not self._thread.recomputed):
            return func(*args, **kwargs)
        if len(self._families):
            if func in METADATA:
                with torch._C.DisableTorchFunctionSubclass():
                    return func(*args, **kwargs)
            args = with_placeholders(func, args, kwargs)
            self._compute_before(func, args, kwargs)
            if any(type(x) is LazyTensor for x in tensors_in((args, kwargs))):
                return self._defer_or_run(func, args, kwargs)
        if func in PRODUCTS:
            return self._product(func, args, kwargs)
        return self._plain(func, args, kwargs)

    def recompute_context(self) -> Context:
        """Return the context that the backward pass enters to recompute the running checkpoint."""
        return self._recomputed

    @contextmanager
    def _recomputed(self) -> Iterator[None]:
        """Fuse attention within the block, while the backward pass recomputes a checkpointed layer."""
        is_on = self in torch.overrides._get_current_function_mode_stack()
        self._thread.recomputed += 1
        try:
            with nullcontext() if is_on else self._entered():
                yield
        finally:
            self._thread.recomputed -= 1

    def _entered(self) -> AbstractContextManager[Any]:
        """Return the context that activates the mode."""
        return self

    def _plain(self, func: Any, args: Any, kwargs: Any) -> Any:
        """Run a torch call whose arguments contain no lazy tensors, and track softmax results and repeated heads."""
        out = func(*args, **kwargs) if self._tap is None else self._tap.run(func, args, kwargs)
        if func in REPEAT_FUNCTIONS:
            self._repeats.record(func, args, kwargs, out)
        return out

    def _product(self, func: Any, args: Any, kwargs: Any) -> Any:
        """Defer a matrix product if it may be attention scores, and return a lazy tensor; otherwise compute it."""
        is_tracked = self._tap is not None and self._tap.is_tracking((args, kwargs))
        product = product_of(func, args, kwargs) if is_eager() and not is_tracked else None
        scores = None if product is None else scores_of(product, self._repeats)
        if product is None or scores is None or not enter_when_recomputed(self.recompute_context()):
            return self._plain(func, args, kwargs)
        operation = Operation(func, args, kwargs)
        family = Family(dispatch_keys(torch.is_inference_mode_enabled()))
        self._families.add(family)
        memory = Memory.of_product(product)
        return LazyTensor.of(Pending(scores.with_operands(operation.tensors), operation, family, memory))

    def _defer_or_run(self, func: Any, args: Any, kwargs: Any) -> Any:
        """Defer a torch call on lazy tensors if it may be part of attention; otherwise run it."""
        lazies = [x for x in tensors_in((args, kwargs)) if type(x) is LazyTensor and not x.pending.is_computed]
        for lazy in lazies:
            # Without a softmax, an operand of a product is an ordinary activation. The values of weights that are made
            # are not those of the deferred operations.
            pending = lazy.pending
            if pending.scores.softmax is None if func in PRODUCTS else pending.make is not None:
                pending.family.compute()
        lazies = [x for x in lazies if not x.pending.is_computed]
        if lazies:
            first = _largest(lazies)
            for lazy in lazies:  # compute other products, such as a bias that depends on the query
                if lazy.pending.family is not first.pending.family:
                    lazy.pending.family.compute()
            state_args, state_kwargs = map_nested(_state, (args, kwargs))
            if func not in PRODUCTS:
                scores = scores_after(func, state_args, state_kwargs)
                is_lazy, out = (False, None) if scores is None else _apply_lazily(first, scores, func, args, kwargs)
                if is_lazy:
                    return out
            else:
                product = product_of(func, state_args, state_kwargs)
                first.pending.scores.check_current()
                recovered = (
                    None
                    if product is None
                    else attention_call(product, self._repeats, allow_non_finite=self._allow_non_finite)
                )
                if recovered is not None:
                    result = self._attention(*recovered, first.pending.family)
                    if result is not None:
                        return result
                    args, kwargs = materialised((args, kwargs))
                    return func(*args, **kwargs)
        weights = [x for x in tensors_in((args, kwargs)) if type(x) is LazyTensor]
        args, kwargs = materialised((args, kwargs))
        self._track_weights(weights)
        return self._product(func, args, kwargs) if func in PRODUCTS else self._plain(func, args, kwargs)

    def _track_weights(self, lazies: list[LazyTensor]) -> None:
        """Track materialised weights until the model multiplies them by values."""
        for pending in (lazy.pending for lazy in lazies):
            if self._tap is not None and isinstance(pending.scores, Exponentials):
                self._tap.track_unknown(pending.value)
            softmax, axes = pending.scores.softmax, pending.scores.axes.axes
            if self._tap is not None and softmax in axes:
                self._tap.track(pending.value, axes.index(softmax))

    def _attention(self, call: AttentionCall, output: Output, family: Family) -> Tensor | None:
        """Run an attention call; return None if the model's own code must compute it."""
        family.has_pending_dropout = False  # saccade draws the dropout
        if call.dropout_p:
            self._compute_pending_dropout()
        out = self._run(call)
        if out is None:
            return None
        matrix = self._changed_matrix()
        if matrix is not None:  # weights that the model reads or returns are those of the call that ran
            family.make_weights(functools.partial(output.weights_of, matrix, call.value.shape[2]))
        if self._on_attention is not None:
            self._on_attention(call)
        return output.arranged(out)

    def _changed_matrix(self) -> Matrix | None:
        """Return the matrix of the call that has just run, if it is not the one that the model asked for."""
        return None

    def _compute_before(self, func: Any, args: Any, kwargs: Any) -> None:
        """Compute lazy tensors whose operands a call overwrites, and those with pending dropout before random calls."""
        if _is_random(func):
            self._compute_pending_dropout()
        if (
            writes(func)
            or "out" in kwargs
            or (func in _MAY_WRITE and any(x is True for x in (*args, *kwargs.values())))
        ):
            is_operation = isinstance(func, torch._ops.OpOverload | torch._ops.OpOverloadPacket)
            # Torch's functions and methods write to their first argument, or to `out`.
            for x in tensors_in((args if is_operation else args[:1], kwargs)):
                for family in list(self._families):
                    if type(x) is not LazyTensor and (not is_dense(x) or family.reads_memory_of(x)):
                        family.compute()

    def _compute_pending_dropout(self) -> None:
        for family in list(self._families):
            if family.has_pending_dropout:
                family.compute()


def _report_arranged(on_weights: Callable[[Tensor], None]) -> Callable[[Tensor, Arrange], None]:
    def report(weights: Tensor, arrange: Arrange) -> None:
        with torch.no_grad():
            on_weights(arrange(weights.detach()))

    return report


class _ThreadState(threading.local):
    """The number of checkpoints that each thread is currently recomputing."""

    def __init__(self) -> None:
        self.recomputed = 0


def _largest(lazies: list[LazyTensor]) -> LazyTensor:
    """Return the lazy tensor with the most elements; the others may broadcast to its shape."""
    sizes = [tuple(x.pending.scores.axes.shape) for x in lazies]
    most = max(math.prod(size) for size in sizes)
    return next(x for x, size in zip(lazies, sizes, strict=True) if math.prod(size) == most)


def _apply_lazily(
    lazy: LazyTensor, scores: Scores | RowMaximum | OfScores, func: Any, args: Any, kwargs: Any
) -> tuple[bool, Any]:
    """Defer a call on a lazy tensor; return whether this is possible, and the lazy result."""
    pending = lazy.pending
    if scores is pending.scores:
        return True, lazy
    is_in_place = writes(func) or (func is F.dropout and any(x is True for x in (*args[3:], kwargs.get("inplace"))))
    views = pending.sharing_memory() if is_in_place else []
    if views is None or pending.has_gradients != torch.is_grad_enabled():
        return False, None
    memory = pending.memory.after(func, map_nested(_state, args))
    args, kwargs = map_nested(_operation, (args, kwargs))
    operation = Operation(func, args, kwargs)
    scores = scores.with_operands(operation.tensors)
    pending.family.has_pending_dropout |= scores.dropout_p > 0.0
    if is_in_place:
        assert isinstance(scores, Scores)
        lazy.update(replace(scores, dtype=pending.scores.dtype), operation)
        for view in views:
            other = view.lazy()
            assert other is not None  # it keeps its state alive
            other.update(*view.changed_with(pending))
        return True, None if func is Tensor.__setitem__ else lazy
    if isinstance(scores, RowMaximum) and func in _MAX:
        return True, _maxima(scores, operation, pending.family)
    return True, LazyTensor.of(Pending(scores, operation, pending.family, memory))


def _maxima(maximum: RowMaximum, operation: Operation, family: Family) -> Any:
    """Return the pair of values and positions that ``max`` returns, both lazy."""
    positions = RowArgmax(maximum.of, maximum.axis, torch.int64, maximum.operands)

    def item(state: RowMaximum | RowArgmax, number: int) -> Tensor:
        its = Operation(itemgetter(number), (operation,), {})
        return LazyTensor.of(Pending(state, its, family, Memory(object())))

    return torch.return_types.max((item(maximum, 0), item(positions, 1)))


def _state(x: Any) -> Any:
    """Return a lazy tensor's `Scores`, or its values if they are already computed; return other arguments unchanged."""
    if type(x) is not LazyTensor:
        return x
    return x.pending.value if x.pending.is_computed else x.pending.scores


def _operation(x: Any) -> Any:
    if type(x) is not LazyTensor:
        return x
    return x.pending.value if x.pending.is_computed else x.pending.operation


def is_eager() -> bool:
    """Return whether torch runs operations eagerly, so that attention can be fused."""
    is_traced = torch._C._get_tracing_state() is not None or is_recorded()
    is_captured = torch.cuda.is_available() and torch.cuda.is_current_stream_capturing()
    return not (is_traced or is_captured or is_transformed() or has_forward_derivatives())


_MAX = frozenset({torch.max, Tensor.max})
_MAY_WRITE = frozenset(
    x for x in vars(F).values() if "inplace" in getattr(getattr(x, "__code__", None), "co_varnames", ())
)
_RANDOM = ("dropout", "rand", "bernoulli", "multinomial", "poisson", "uniform_", "exponential_", "gumbel", "attention")


@functools.cache
def _is_random(func: Callable[..., Any]) -> bool:
    """Return whether a torch function may generate random numbers."""
    name = str(getattr(func, "__name__", ""))
    return any(word in name for word in _RANDOM) or name.rstrip("_").endswith("normal")
