"""Modes of torch: whether autocast, compilation, ``torch.func`` transforms and fake tensors are active."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from typing import ParamSpec, TypeVar

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor
from torch.overrides import _pop_mode_temporarily as _without_function_mode
from torch.utils._python_dispatch import _pop_mode_temporarily as _without_dispatch_mode

_RECORDS = torch._C._TorchDispatchModeKey.PROXY
_FUNCTIONAL = torch._C._functorch.TransformType.Functionalize
_VMAP = torch._C._functorch.TransformType.Vmap
P = ParamSpec("P")
R = TypeVar("R")

# Reasons of `outside_graph`.
CACHED = "a cache changes with each call, so a compiled graph cannot contain it"
CHOSEN_BY_VALUES = "the selected keys depend on values, which a compiled graph does not have"

is_tracing = torch.compiler.is_compiling  # the same object, which Dynamo evaluates while it traces
"""Return whether a compiler traces the program, in which case nothing may be cached and no values may be read.

Dynamo traces a frame only if it holds a tensor or names ``torch``. Functions without either that must raise an error
when compiled call ``torch.compiler.is_compiling()`` by its full name.
"""
any_autocast = getattr(torch._C, "_is_any_autocast_enabled", lambda: True)
"""Return whether autocast may be enabled on any device. This quick check lets callers skip slower ones."""
is_transformed = getattr(torch._C, "_are_functorch_transforms_active", lambda: False)
"""Return whether a transform of ``torch.func`` is active. Attention must then be a single autograd function."""
num_dispatch_modes = torch._C._len_torch_dispatch_stack
"""Return the number of active dispatch modes. Dynamo cannot trace it, so check `is_tracing` first."""


def is_one_operation() -> bool:
    """Return whether attention must be one operator: in a traced program, and for ``torch.func.functionalize``."""
    if is_tracing() or (num_dispatch_modes() and is_recorded()):  # two conditions, since each Python call counts
        return True
    return is_transformed() and torch._C._functorch.peek_interpreter_stack().key() == _FUNCTIONAL


def is_recorded() -> bool:
    """Return whether ``make_fx`` records operations; `is_tracing` is False in that case.

    Attention must be recorded as one operation, because with fake tensors, the operations inside a kernel only compute
    shapes.
    """
    if is_tracing() or not num_dispatch_modes():
        return False
    return torch._C._get_dispatch_mode(_RECORDS) is not None


def outside_graph(function: Callable[P, R], reason: str) -> Callable[P, R]:
    """Return a function that a compiler runs between two graphs.

    With ``fullgraph=True``, the compiler raises an error that contains ``reason`` instead. Unlike the decorator
    ``torch.compiler.disable``, this function does not import the compiler when saccade is imported.
    """
    if torch.compiler.is_dynamo_compiling():
        torch._dynamo.graph_break(msg=reason)
    outside: Callable[P, R] = torch.compiler.disable(function)
    return outside


def constant_result(function: Callable[P, R]) -> Callable[P, R]:
    """Mark a function that a compiler calls once per graph, and whose result it takes as constant; a decorator.

    Unlike ``torch.compiler.assume_constant_result``, which sets the same mark, it does not import the compiler.
    """
    function._dynamo_marked_constant = True  # type: ignore[attr-defined]
    return function


def in_backward() -> bool:
    """Return whether autograd is running a backward pass in this thread, as it does to recompute a checkpoint."""
    return torch._C._current_graph_task_id() != -1


def is_autocast(x: Tensor) -> bool:
    """Return whether autocast is enabled on the device of a tensor."""
    return not x.is_meta and torch.is_autocast_enabled(x.device.type)


def without_autocast(device: torch.device) -> AbstractContextManager[object]:
    """Return a context manager that disables autocast on a device. The meta device has no autocast."""
    return torch.autocast(device.type, enabled=False) if any_autocast() and device.type != "meta" else nullcontext()


def is_mapped(x: Tensor) -> bool:
    """Return whether ``vmap`` maps a tensor. The values of such a tensor cannot be read."""
    return is_transformed() and any(torch._C._functorch.is_batchedtensor(layer) for layer in _layers(x))


def mapped_levels(x: Tensor) -> tuple[tuple[int, ...], Tensor]:
    """Return the levels of ``vmap`` that map a tensor, and the underlying tensor with all samples."""
    layers = list(_layers(x)) if is_transformed() else [x]
    functorch = torch._C._functorch
    return tuple(functorch.maybe_get_level(layer) for layer in layers if functorch.is_batchedtensor(layer)), layers[-1]


def count_vmaps() -> int:
    """Return the number of enclosing functions that ``vmap`` maps."""
    if not is_transformed():
        return 0
    return sum(one.key() == _VMAP for one in torch._C._functorch.get_interpreter_stack())


def can_hold(memory: Tensor, new: Tensor) -> bool:
    """Return whether ``new`` can be written to ``memory``: every ``torch.func`` transform of ``new`` wraps both."""
    return not is_transformed() or _levels(new) <= _levels(memory)


def _levels(x: Tensor) -> set[int]:
    return {torch._C._functorch.maybe_get_level(layer) for layer in [*_layers(x)][:-1]}


def current_transform_level() -> int:
    """Return the level of the ``torch.func`` transform that is currently applied to an autograd function."""
    below = torch._C._functorch.peek_interpreter_stack()
    return 1 if below is None else int(below.level()) + 1


def wants_gradient(x: Tensor) -> bool:
    """Return whether autograd or a transform at any level may compute a gradient of a tensor.

    Inside a transform, ``requires_grad`` does not reflect the outer transforms.
    """
    if not torch.is_grad_enabled():
        return False
    if not is_transformed():
        return x.requires_grad
    return any(layer.requires_grad or torch._C._functorch.is_gradtrackingtensor(layer) for layer in _layers(x))


def _layers(x: Tensor) -> Iterator[Tensor]:
    """Yield a tensor and the tensors that it wraps in nested ``torch.func`` transforms, innermost transform first."""
    while torch._C._functorch.is_functorch_wrapped_tensor(x):
        yield x
        x = torch._C._functorch.get_unwrapped(x)
    yield x


def has_forward_derivatives() -> bool:
    """Return whether forward-mode derivatives (``jvp``, ``jacfwd``) are active. They need a rule for each operation."""
    return torch.autograd.forward_ad._current_level >= 0 and not is_tracing()


def has_values(x: Tensor) -> bool:
    """Return whether a tensor has values. It has none on the meta device and under FakeTensorMode."""
    return not x.is_meta and not isinstance(x, FakeTensor)


def is_plain(x: Tensor) -> bool:
    """Return whether a tensor is an ordinary tensor, which may be written in place and cached for later calls."""
    return type(x) in (Tensor, torch.nn.Parameter) and not is_tracing() and not is_transformed()


def unobserved() -> AbstractContextManager[object]:
    """Return a context manager for computing results to cache, without gradients and without the caller's torch modes.

    A dispatch mode (selective checkpointing, a FLOP counter, fake tensors) then sees the same operations in the first
    call as in later calls, and no cached tensor belongs to the mode or is an inference tensor.
    """
    return nullcontext() if is_tracing() else _unobserved()


@contextmanager
def _unobserved() -> Iterator[None]:
    with ExitStack() as stack:
        while torch._C._len_torch_function_stack():
            stack.enter_context(_without_function_mode())
        while num_dispatch_modes():
            stack.enter_context(_without_dispatch_mode())
        stack.enter_context(torch.inference_mode(False))  # switches gradients on
        stack.enter_context(torch.no_grad())
        yield
