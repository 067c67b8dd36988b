"""Several processes that run one model together: all must see the same numbers, and so take the same branches.

Each process has the whole inputs and outputs, but every pass waits for all: a process in another branch would wait
forever. So every decision uses the numbers of the first process. The gradient in one process is a share of the model's
gradient; the sum over the processes is the model's.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from saccade.support.errors import value_error

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup


def replicated(model: Callable[..., Any]) -> Callable[..., Any]:
    """Return the module that DistributedDataParallel replicates, without its communication; other models unchanged.

    Raises:
        ValueError: the replicas are compiled with their messages.
    """
    if isinstance(getattr(model, "_orig_mod", None), nn.parallel.DistributedDataParallel):
        rule = "be compiled before it is replicated"
        raise value_error("model", rule, "torch.compile(DistributedDataParallel(...))", hint="audit its .module")
    return model.module if isinstance(model, nn.parallel.DistributedDataParallel) else model


def broadcast_first(tensor: Tensor, group: ProcessGroup | None) -> Tensor:
    """Return the tensor of the group's first process, in every process."""
    if group is None:
        return tensor
    received = tensor.detach().clone(memory_format=torch.contiguous_format)
    torch.distributed.broadcast(received, group=group, group_src=0)
    return received


def shared(vectors: Tensor, group: ProcessGroup | None) -> Tensor:
    """Return the same vectors; their gradient is summed over the processes, in every process."""
    return vectors if group is None else _Shared.apply(vectors, group)


def check_same(tensor: Tensor, group: ProcessGroup | None) -> None:
    """Raise in all processes if the inputs differ in one."""
    if group is None:
        return
    differs = torch.tensor(float(not torch.equal(broadcast_first(tensor, group), tensor)), device=tensor.device)
    torch.distributed.all_reduce(differs, group=group)
    if differs:
        raise value_error("inputs", "be the same in all processes of the group", "others in some")


class _Shared(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, vectors: Tensor, group: ProcessGroup) -> Tensor:
        ctx.group = group
        return vectors.view_as(vectors)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        total = grad.clone(memory_format=torch.contiguous_format)
        torch.distributed.all_reduce(total, group=ctx.group)
        return broadcast_first(total, ctx.group), None
