"""Several processes that run one model together: all must see the same numbers, and so take the same branches.

Each reads the whole inputs and is given the whole outputs, but every pass waits for all: a process that took another
branch than the rest would wait forever. So whatever is decided upon is that of the first process, in all of them. What
one process asks of a token by gradient is its own share; the sum is what the model asks.
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
    """The model itself, of one that DistributedDataParallel replicates: what that adds are messages between processes.

    Raises:
        ValueError: the replicas are compiled with their messages.
    """
    if isinstance(getattr(model, "_orig_mod", None), nn.parallel.DistributedDataParallel):
        rule = "be compiled before it is replicated"
        raise value_error("model", rule, "torch.compile(DistributedDataParallel(...))", hint="audit its .module")
    return model.module if isinstance(model, nn.parallel.DistributedDataParallel) else model


def agreed(tensor: Tensor, group: ProcessGroup | None) -> Tensor:
    """What the first process of the group has, in all of them."""
    if group is None:
        return tensor
    told = tensor.detach().clone(memory_format=torch.contiguous_format)
    torch.distributed.broadcast(told, group=group, group_src=0)
    return told


def shared(vectors: Tensor, group: ProcessGroup | None) -> Tensor:
    """The same vectors; their gradient is the sum of what each process asks of them, in all of them."""
    return vectors if group is None else _Shared.apply(vectors, group)


def check_same(tensor: Tensor, group: ProcessGroup | None) -> None:
    """Raises in all processes if their inputs differ in one."""
    if group is None:
        return
    differs = torch.tensor(float(not torch.equal(agreed(tensor, group), tensor)), device=tensor.device)
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
        return agreed(total, ctx.group), None
