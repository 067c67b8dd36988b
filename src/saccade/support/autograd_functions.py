"""Conditions for merging operations into an autograd function, and gradients recomputed from the operations."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor

from saccade.support.torch_modes import has_forward_derivatives, is_autocast, is_plain, is_recorded, is_transformed


def is_eager_training(*tensors: Tensor) -> bool:
    """Return whether autograd alone records the next operation, on ordinary CPU tensors of the same wide dtype.

    An operation may then be an autograd function with a backward pass of few operations, which neither compilers nor
    transforms, autocast or forward-mode derivatives need to see through. Fake tensors count as ordinary, so that a
    forecast of a training step is one of the same operations.
    """
    dtype = tensors[0].dtype
    is_fake = not torch.compiler.is_dynamo_compiling() and type(tensors[0]) is FakeTensor
    return (
        torch.is_grad_enabled()
        and dtype in (torch.float32, torch.float64)
        and all((type(x) is FakeTensor if is_fake else is_plain(x)) and x.dtype == dtype for x in tensors)
        and all(x.is_cpu for x in tensors)
        and any(x.requires_grad for x in tensors)
        and not is_transformed()
        and not is_recorded()
        and (is_fake or not has_forward_derivatives())
        and not is_autocast(tensors[0])
    )


def needs_plain_backward(grad: Tensor) -> bool:
    """Return whether a backward pass must consist of operations that autograd and every kind of `vmap` support.

    The pass is then differentiated again, or gets many gradients at a time, also by ``is_grads_batched=True``.
    """
    return torch.is_grad_enabled() or is_transformed() or torch._C._functorch.is_legacy_batchedtensor(grad)


def recomputed_gradients(
    function: Callable[..., Tensor], inputs: Sequence[Tensor], wanted: Sequence[bool], grad: Tensor
) -> tuple[Tensor | None, ...]:
    """Return gradients of ``function(*inputs)``, None for those not wanted; differentiable again if autograd records.

    The backward pass of an autograd function calls it if `needs_plain_backward`. ``function`` consists of operations
    that autograd records.
    """
    create_graph = torch.is_grad_enabled()
    with torch.enable_grad():
        own = [x.view_as(x) for x in inputs]  # an input may be computed from another
        out = function(*own)
        asked = [x for x, is_wanted in zip(own, wanted, strict=True) if is_wanted]
        found = iter(torch.autograd.grad(out, asked, grad, create_graph=create_graph))
    return tuple(next(found) if is_wanted else None for is_wanted in wanted)
