"""LazyTensor: attention scores or weights whose operations run only when their values are needed."""

from __future__ import annotations

import functools
import itertools
import sys
import weakref
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from saccade.fusion.arguments import map_nested, tensors_in
from saccade.fusion.checkpoints import innermost_hook, outside_later_hooks
from saccade.fusion.memory import Memory
from saccade.fusion.row_maximum import RowMaximum
from saccade.fusion.scores import Scores
from saccade.fusion.written_softmax import OfScores
from saccade.support.errors import unsupported
from saccade.support.torch_modes import any_autocast

_DEVICES = ("cpu", "cuda", "xpu", "mps")

METADATA = frozenset(
    {
        *(Tensor.size, Tensor.dim, Tensor.ndimension, Tensor.nelement, Tensor.numel, Tensor.__len__),
        *(Tensor.is_floating_point, Tensor.is_complex, Tensor.is_signed, Tensor.element_size, Tensor.get_device),
        *(torch.is_floating_point, torch.is_complex, torch.numel),
        *(
            getattr(Tensor, name).__get__
            for name in ("shape", "dtype", "device", "ndim", "layout", "is_cuda", "is_cpu", "is_sparse", "is_meta")
        ),
        *(
            getattr(Tensor, name).__get__
            for name in ("requires_grad", "is_leaf", "is_quantized", "is_nested", "itemsize")
        ),
    }
)
"""Functions that read only metadata, so they do not need a lazy tensor's values."""

_LIKE = frozenset(
    {
        *(torch.full_like, torch.zeros_like, torch.ones_like, torch.empty_like),
        *(Tensor.new_full, Tensor.new_zeros, Tensor.new_ones, Tensor.new_empty, Tensor.new_tensor),
    }
)
_AS = frozenset({Tensor.expand_as, Tensor.view_as, Tensor.reshape_as, Tensor.type_as, Tensor.to})


class Operation:
    """A deferred call to a torch function, with the same result as an immediate call.

    Args:
        func, args, kwargs: the call; each `Operation` among the arguments is replaced by its result.

    Attributes:
        differentiable: the tensors among the arguments that require gradients.
        aliases: views of these tensors, passed in their place when the call runs.
        memory: the memory of the result.
    """

    def __init__(self, func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]):
        self._call = (func, args, kwargs)
        self._settings = _current_settings()
        is_on = torch.is_grad_enabled()
        self.tensors = list(tensors_in((args, kwargs)))
        self.differentiable = [x for x in self.tensors if is_on and x.requires_grad]
        self.aliases: list[Tensor] = []
        self.memory: Memory | None = None

    def run(self, results: dict[Operation, Any]) -> Any:
        """Run the deferred call and the calls that it depends on, skipping those whose results are known."""
        if self not in results:
            func, args, kwargs = map_nested(lambda x: x.run(results) if type(x) is Operation else x, self._call)
            with _with_settings(self._settings):
                if self.differentiable:
                    self.aliases = [x.view_as(x) for x in self.differentiable]
                    aliases, originals = iter(self.aliases), {id(x) for x in self.differentiable}
                    args, kwargs = map_nested(lambda x: next(aliases) if id(x) in originals else x, (args, kwargs))
                out = func(*args, **kwargs)
                results[self] = args[0] if out is None else out  # index assignment returns None
        return results[self]

    def is_in(self, memory: Memory) -> bool:
        """Return whether the result may share memory with values in ``memory``."""
        return self.memory is not None and self.memory.owner is memory.owner

    def with_dependencies(self) -> Iterator[Operation]:
        """Yield the deferred calls that this call depends on, then the call itself."""
        operations: list[Operation] = []
        map_nested(lambda x: operations.append(x) if type(x) is Operation else None, self._call)
        for operation in operations:
            yield from operation.with_dependencies()
        yield self


def _current_settings() -> tuple[Any, ...]:
    """Return the current gradient and autocast settings, to be restored when a deferred call runs."""
    devices = _DEVICES if any_autocast() else ()
    casts = tuple((device, torch.is_autocast_enabled(device), torch.get_autocast_dtype(device)) for device in devices)
    return torch.is_grad_enabled(), torch.is_inference_mode_enabled(), casts


@contextmanager
def _with_settings(settings: tuple[Any, ...]) -> Iterator[None]:
    """Restore gradient and autocast settings within the block, and disable torch function modes."""
    with ExitStack() as stack:
        stack.enter_context(torch._C.DisableTorchFunction())
        if _current_settings() != settings:
            grad, inference, casts = settings
            if inference != torch.is_inference_mode_enabled():
                stack.enter_context(torch.inference_mode(inference))
            stack.enter_context(torch.set_grad_enabled(grad))
            off = tuple((device, False, torch.get_autocast_dtype(device)) for device in _DEVICES)
            now = _current_settings()[2] or off
            for device, is_on, dtype in set(casts or off) - set(now):
                stack.enter_context(torch.autocast(device, dtype=dtype, enabled=is_on))
        yield


class Family:
    """All lazy tensors derived from one matrix product. They are computed together, because some may share memory.

    Args:
        keys: the included and excluded dispatch keys in effect when the model calls its functions.

    Attributes:
        has_pending_dropout: whether a deferred dropout must still draw random numbers.
    """

    def __init__(self, keys: tuple[Any, Any]):
        self.has_pending_dropout = False
        self._members: weakref.WeakSet[Pending] = weakref.WeakSet()
        self.keys = keys
        hook = innermost_hook()
        self._hook: Callable[[], Any] = (lambda: None) if hook is None else weakref.ref(hook)

    def add(self, member: Pending) -> None:
        """Add a lazy tensor to the family."""
        self._members.add(member)

    @property
    def uncomputed(self) -> list[Pending]:
        """The family's live lazy tensors that are not yet computed, oldest first."""
        return sorted((x for x in self._members if not x.is_computed), key=lambda x: x.number)

    def compute(self) -> None:
        """Compute the family's live lazy tensors, except those with an overwritten operand.

        This causes a graph break in compiled code that receives a lazy tensor.
        """
        (_uncompiled() if "torch._dynamo" in sys.modules else _compute)(self.uncomputed, self._hook)

    compute._torchdynamo_disable = True  # type: ignore[attr-defined]  # like torch.compiler.disable, which imports the compiler

    def make_weights(self, make: Callable[[Scores], Tensor]) -> None:
        """Let a function of their `Scores` compute the attention weights of the family that are not yet computed."""
        for member in self.uncomputed:
            if isinstance(member.scores, Scores) and member.scores.softmax is not None:
                member.make = functools.partial(make, member.scores)

    def reads_memory_of(self, x: Tensor) -> bool:
        """Return whether a tensor shares memory with an operand of a lazy tensor that is not yet computed."""
        operands = (operand for member in self.uncomputed for operand, _ in member.scores.operands)
        return any(_shares_memory(x, operand) for operand in operands)


@functools.lru_cache
def dispatch_keys(_: bool) -> tuple[Any, Any]:
    """Return torch's current dispatch keys for lazy tensors; they depend on inference mode."""
    return torch._C._dispatch_tls_local_include_set(), torch._C._dispatch_tls_local_exclude_set()


def _compute(members: list[Pending], hook: Callable[[], Any]) -> None:
    with outside_later_hooks(hook()):
        _compute_each(members)


def _compute_each(members: list[Pending]) -> None:
    results: dict[Operation, Any] = {}
    for member in members:
        if not member.scores.is_current:
            continue
        if member.make is None:
            member.set_value(member.operation.run(results))
            continue
        with torch._C.DisableTorchFunction(), torch.set_grad_enabled(member.has_gradients):
            member.set_value(member.make())


@functools.cache
def _uncompiled() -> Callable[[list[Pending], Callable[[], Any]], None]:
    return torch.compiler.disable(_compute)  # imports the compiler


def _shares_memory(x: Tensor, y: Tensor) -> bool:
    return x.untyped_storage()._cdata == y.untyped_storage()._cdata


_numbers = itertools.count()


class Pending:
    """The state of a lazy tensor.

    Args:
        scores: the scores or weights that the lazy tensor represents, or the maximum of scores.
        operation: the deferred call that computes the values.
        family: the lazy tensors that are derived from the same matrix product.
        memory: the memory of the values.
    """

    def __init__(self, scores: Scores | RowMaximum | OfScores, operation: Operation, family: Family, memory: Memory):
        self.scores, self.operation, self.family = scores, operation, family
        self.memory = operation.memory = memory
        self.has_gradients = torch.is_grad_enabled()
        self.number = next(_numbers)
        self.lazy: Callable[[], LazyTensor | None] = lambda: None
        self.make: Callable[[], Tensor] | None = None  # computes the values instead of the operation
        self._value: Tensor | None = None
        family.add(self)

    @property
    def is_computed(self) -> bool:
        """Whether the values of the lazy tensor have been computed."""
        return self._value is not None

    @property
    def value(self) -> Tensor:
        """The dense tensor, computed by the model's operations when first needed."""
        if self._value is None:
            self.family.compute()
            self.scores.check_current()
        assert self._value is not None
        return self._value

    def set_value(self, value: Tensor) -> None:
        """Store the computed values of the lazy tensor."""
        self._value = value

    def sharing_memory(self) -> list[Pending] | None:
        """Return the other lazy tensors that an in-place operation changes: views of the same memory.

        Return None if the operation must not be deferred, because another lazy tensor was computed from the old values
        or has split the axes.
        """
        views: list[Pending] = []
        for other in self.family.uncomputed:
            if other.memory.owner is self.memory.owner:
                views += [] if other is self else [other]
            elif any(operation.is_in(self.memory) for operation in other.operation.with_dependencies()):
                return None
        is_alike = all(
            isinstance(x.scores, Scores)
            and isinstance(self.scores, Scores)
            and x.scores.all_factors == self.scores.all_factors
            and x.has_gradients == self.has_gradients
            and x.memory.is_certain
            for x in views
        )
        return views if is_alike and (self.memory.is_certain or not views) else None

    def changed_with(self, other: Pending) -> tuple[Scores, Operation]:
        """Return the scores of this view after ``other``, a view of the same memory, was changed in place."""
        assert isinstance(self.scores, Scores)
        assert isinstance(other.scores, Scores)
        scores = replace(other.scores, axes=self.scores.axes, heads=self.scores.heads)
        return scores, Operation(_first, (self.operation, other.operation), {})

    @property
    def differentiable(self) -> list[Tensor]:
        """The operands of the lazy tensor that require gradients."""
        return [] if self.scores.is_detached else [x for call in self._dependencies for x in call.differentiable]

    @property
    def aliases(self) -> list[Tensor]:
        """Views of the differentiable operands; the lazy tensor was computed from these views."""
        return [x for call in self._dependencies for x in call.aliases]

    @property
    def _dependencies(self) -> dict[Operation, None]:
        """The deferred calls of the lazy tensor, without duplicates, because an operation may read the scores twice."""
        return dict.fromkeys(self.operation.with_dependencies())


def _first(x: Tensor, _: Tensor) -> Tensor:
    return x


class LazyTensor(Tensor):
    """A tensor that represents attention scores or weights without computing them.

    Outside the mode that created it, any use computes the values. The tensor has a node in autograd's graph, so
    gradients also flow through code that bypasses torch functions, such as an ``autograd.Function``.
    """

    pending: Pending

    @staticmethod
    def __new__(cls, pending: Pending) -> LazyTensor:
        scores = pending.scores
        shape, dtype, device = scores.axes.shape, scores.dtype, scores.left.device
        lazy: LazyTensor = Tensor._make_wrapper_subclass(cls, shape, dtype=dtype, device=device)
        lazy.pending, pending.lazy = pending, weakref.ref(lazy)
        return lazy

    @classmethod
    def of(cls, pending: Pending) -> LazyTensor:
        """Return a lazy tensor for a pending state, connected to its operands in autograd's graph."""
        operands = pending.differentiable
        return _Node.apply(pending, *operands) if operands else cls(pending)

    def update(self, scores: Scores, operation: Operation) -> None:
        """Apply an in-place operation to the lazy tensor; apply it to views of the same memory as well."""
        self.pending.scores, self.pending.operation = scores, operation
        operation.memory = self.pending.memory
        operands = self.pending.differentiable
        if operands and torch.is_grad_enabled():
            with torch._C.DisableTorchFunctionSubclass():
                _NodeInPlace.apply(self, *operands)

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func in METADATA:
            with torch._C.DisableTorchFunctionSubclass():
                return func(*args, **(kwargs or {}))
        args, kwargs = materialised((args, kwargs or {}))
        return func(*args, **kwargs)

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:  # type: ignore[override]
        for x in tensors_in((args, kwargs or {})):
            if type(x) is LazyTensor:
                with torch._C._ForceDispatchKeyGuard(*x.pending.family.keys):  # as in the model's own calls
                    x.pending.family.compute()
        args, kwargs = map_nested(_detached, materialised((args, kwargs or {})))
        return func(*args, **kwargs)


def _detached(x: Any) -> Any:
    return x.detach() if isinstance(x, Tensor) else x


def with_placeholders(func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Any, ...]:
    """Replace a lazy argument with an empty placeholder if the function, such as ``zeros_like``, reads no values."""
    is_named = func is Tensor.type and len(args) == 1 and not kwargs  # returns the name of the tensor's type
    position = 0 if func in _LIKE or is_named else 1
    if len(args) <= position or type(args[position]) is not LazyTensor or args[position].pending.is_computed:
        return args
    if position == 1 and (func not in _AS or type(args[0]) is LazyTensor):
        return args
    scores = args[position].pending.scores
    placeholder = torch.empty(1, dtype=scores.dtype, device=scores.left.device).expand(scores.axes.shape)
    return (*args[:position], placeholder, *args[position + 1 :])


def materialised(tree: Any) -> Any:
    """Return the arguments of a torch call with each lazy tensor replaced by its computed value."""
    return map_nested(lambda x: x.pending.value if type(x) is LazyTensor else x, tree)


class _Node(torch.autograd.Function):
    """The node of a lazy tensor in autograd's graph."""

    @staticmethod
    def forward(ctx: Any, pending: Any, *operands: Tensor) -> Tensor:
        ctx.pending = pending
        return LazyTensor(pending)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        if ctx.pending.make is not None:
            reasons = ["code that calls no torch function has read the weights of a call that saccade has changed"]
            raise unsupported("backward", reasons, hint="read the weights with torch's functions")
        value, aliases = ctx.pending.value, ctx.pending.aliases
        create_graph = torch.is_grad_enabled()
        grads = torch.autograd.grad(
            value, aliases, grad, retain_graph=True, create_graph=create_graph, allow_unused=True
        )
        return None, *grads


class _NodeInPlace(_Node):
    """The node of a lazy tensor that was changed in place."""

    @staticmethod
    def forward(ctx: Any, lazy: Any, *operands: Tensor) -> Tensor:
        ctx.pending = lazy.pending
        ctx.mark_dirty(lazy)
        return lazy
