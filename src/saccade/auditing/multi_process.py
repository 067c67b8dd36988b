"""Audit a model that several processes run together. All processes must make the same decisions.

Each process has the full inputs and outputs, but every pass waits for all processes, so a process that takes a
different branch would wait forever. Therefore every decision is based on values from the first process. Each process
computes only part of the model's gradient; the full gradient is the sum over all processes.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from saccade.support.errors import value_error

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup


def unwrap_ddp(model: Callable[..., Any]) -> Callable[..., Any]:
    """Unwrap a DistributedDataParallel module, so that it runs without communication; return other models unchanged.

    Raises:
        ValueError: the replicas are compiled together with their communication.
    """
    if isinstance(getattr(model, "_orig_mod", None), nn.parallel.DistributedDataParallel):
        rule = "be compiled before it is replicated"
        raise value_error("model", rule, "torch.compile(DistributedDataParallel(...))", hint="audit its .module")
    return model.module if isinstance(model, nn.parallel.DistributedDataParallel) else model


def broadcast_first(tensor: Tensor, group: ProcessGroup | None) -> Tensor:
    """Send the tensor of the group's first process to every process, and return it."""
    if group is None:
        return tensor
    received = tensor.detach().clone(memory_format=torch.contiguous_format)
    torch.distributed.broadcast(received, group=group, group_src=0)
    return received


def with_summed_gradient(vectors: Tensor, group: ProcessGroup | None) -> Tensor:
    """Return the token embeddings unchanged, but with a gradient that is summed over all processes."""
    return vectors if group is None else _SummedGradient.apply(vectors, group)


def check_same(tensor: Tensor, group: ProcessGroup | None) -> None:
    """Raise an error in all processes if the inputs of any process differ from the first process's inputs."""
    if group is None:
        return
    differs = torch.tensor(float(not torch.equal(broadcast_first(tensor, group), tensor)), device=tensor.device)
    torch.distributed.all_reduce(differs, group=group)
    if differs:
        raise value_error("inputs", "be the same in all processes of the group", "different inputs")


class _SummedGradient(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, vectors: Tensor, group: ProcessGroup) -> Tensor:
        ctx.group = group
        return vectors.view_as(vectors)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        total = grad.clone(memory_format=torch.contiguous_format)
        torch.distributed.all_reduce(total, group=ctx.group)
        return broadcast_first(total, ctx.group), None
