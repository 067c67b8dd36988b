"""Whether autocast, a compiler or a transform of ``torch.func`` is at work, for which tensors stand for others."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor
from torch.overrides import _pop_mode_temporarily as _without_function_mode
from torch.utils._python_dispatch import _pop_mode_temporarily as _without_dispatch_mode

__all__ = [
    "any_autocast",
    "has_forward_derivatives",
    "has_values",
    "is_autocast",
    "is_mapped",
    "is_plain",
    "is_transformed",
    "level_left",
    "mapped_levels",
    "unobserved",
    "wants_gradient",
    "without_autocast",
]

any_autocast = getattr(torch._C, "_is_any_autocast_enabled", lambda: True)
"""Whether autocast may be switched on anywhere; mostly it is not, and this is told fastest."""
is_transformed = getattr(torch._C, "_are_functorch_transforms_active", lambda: False)
"""Whether a transform of ``torch.func`` is at work, which has to see one function and not what is in it."""


def is_autocast(x: Tensor) -> bool:
    """Whether autocast is switched on where a tensor is."""
    return not x.is_meta and torch.is_autocast_enabled(x.device.type)


def without_autocast(device: torch.device) -> AbstractContextManager[object]:
    """Autocast switched off on a device, where it may be on; torch knows none for tensors without memory."""
    return torch.autocast(device.type, enabled=False) if any_autocast() and device.type != "meta" else nullcontext()


def is_mapped(x: Tensor) -> bool:
    """Whether ``vmap`` is at work on a tensor, so that what it holds cannot be read."""
    return is_transformed() and any(torch._C._functorch.is_batchedtensor(layer) for layer in _layers(x))


def mapped_levels(x: Tensor) -> tuple[tuple[int, ...], Tensor]:
    """Return the levels of ``vmap`` that map a tensor, and the tensor of all samples."""
    layers = list(_layers(x)) if is_transformed() else [x]
    functorch = torch._C._functorch
    return tuple(functorch.maybe_get_level(layer) for layer in layers if functorch.is_batchedtensor(layer)), layers[-1]


def level_left() -> int:
    """Return the level of the transform whose own rule for a function is running."""
    below = torch._C._functorch.peek_interpreter_stack()
    return 1 if below is None else int(below.level()) + 1


def wants_gradient(x: Tensor) -> bool:
    """Whether a gradient of a tensor may be asked for, by autograd or by a transform at any level.

    Inside of a transform, ``requires_grad`` says nothing about the outer ones.
    """
    if not torch.is_grad_enabled():
        return False
    if not is_transformed():
        return x.requires_grad
    return any(layer.requires_grad or torch._C._functorch.is_gradtrackingtensor(layer) for layer in _layers(x))


def _layers(x: Tensor) -> Iterator[Tensor]:
    """The tensors of transforms, from the innermost transform outwards, each wrapped around the next."""
    while torch._C._functorch.is_functorch_wrapped_tensor(x):
        yield x
        x = torch._C._functorch.get_unwrapped(x)
    yield x


def has_forward_derivatives() -> bool:
    """Whether derivatives are taken forwards (``jvp``, ``jacfwd``), for which each operation needs its own rule."""
    return torch.autograd.forward_ad._current_level >= 0 and not torch.compiler.is_compiling()


def has_values(x: Tensor) -> bool:
    """Return False for a tensor that has a shape and no numbers: on the meta device, or under FakeTensorMode."""
    return not x.is_meta and not isinstance(x, FakeTensor)


def is_plain(x: Tensor) -> bool:
    """Whether a tensor is what it seems: memory of its own, which may be written to and kept for the next call."""
    return type(x) in (Tensor, torch.nn.Parameter) and not torch.compiler.is_compiling() and not is_transformed()


def unobserved() -> AbstractContextManager[object]:
    """Run outside of the caller's modes, without gradients: for results that are cached for later calls.

    A dispatch mode (selective checkpointing, a counter of FLOPs, fake tensors) then sees the same operations in the
    first call as in every other, and no cached tensor belongs to the mode, or is an inference tensor.
    """
    return nullcontext() if torch.compiler.is_compiling() else _unobserved()


@contextmanager
def _unobserved() -> Iterator[None]:
    with ExitStack() as stack:
        while torch._C._len_torch_function_stack():
            stack.enter_context(_without_function_mode())
        while torch._C._len_torch_dispatch_stack():
            stack.enter_context(_without_dispatch_mode())
        stack.enter_context(torch.inference_mode(False))  # switches gradients on
        stack.enter_context(torch.no_grad())
        yield
