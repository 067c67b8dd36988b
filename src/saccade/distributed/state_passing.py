"""Passing a memory from rank to rank, and its gradient the way back."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor
from torch.autograd.function import once_differentiable

from saccade.caches.recurrent import Memory
from saccade.distributed.collectives import guarded

__all__ = ["Post", "tied"]

_DTYPES = (torch.float32, torch.float64)


class _Header(NamedTuple):
    """What a rank is told before a memory comes, as int64 numbers.

    Attributes:
        batch, heads, features, width: of the state.
        has_peak: 1 where there is one.
        documents: items of `Memory.segment`; 0 without.
        dtype: number of the state's, in `_DTYPES`.
        needs_gradient: 1 where a gradient is to come back.
    """

    batch: int
    heads: int
    features: int
    width: int
    has_peak: int
    documents: int
    dtype: int
    needs_gradient: int


class Post:
    """Memories on their way between ranks.

    Nobody waits for what he sends before the end of a pass: where a rank has several turns, the one that it sends to
    may be sending, too.

    Args:
        group: of the ranks.
    """

    def __init__(self, group: dist.ProcessGroup | None):
        self.group = group
        self._under_way: list[tuple[Any, Tensor]] = []

    def sent(self, out: Tensor, memory: Memory, peer: int) -> Tensor:
        """Send a memory; ``out`` as it is, through which the memory's gradient comes back.

        Args:
            out: what the tokens before the memory read; going back through it waits for the peer's gradient.
            memory: of all tokens so far.
            peer: who goes on from there, counted in the group.
        """
        state, peak, segment = memory.state, memory.peak, memory.segment
        floats = torch.cat([state.flatten(), *([] if peak is None else [peak.flatten().to(state.dtype)])])
        marks = [*([] if segment is None else [segment]), memory.taints.flatten()]
        needs = torch.is_grad_enabled() and (out.requires_grad or floats.requires_grad)
        documents = 0 if segment is None else len(segment)
        batch, heads, features, width = state.shape
        facts = (int(peak is not None), documents, _DTYPES.index(floats.dtype), int(needs))
        self.send(torch.tensor(_Header(batch, heads, features, width, *facts), device=out.device), peer)
        self.send(torch.cat([mark.to(torch.int64) for mark in marks]), peer)
        made: Tensor = _Sent.apply(out, floats, self, peer)
        return made

    def received(
        self, peer: int, device: torch.device, sources: Sequence[Tensor] = (), *, is_first: bool = False
    ) -> Memory:
        """The memory that a peer sends; its gradient goes back there.

        Args:
            peer: who holds the tokens before, counted in the group.
            device: where the memory is to be.
            sources: of what will read it. Going back to any of them sends the gradient.
            is_first: whether this rank receives nothing before, and so sends no gradient after this one.
        """
        told = torch.empty(len(_Header._fields), dtype=torch.int64, device=device)
        header = _Header(*self.receive(told, peer).tolist())
        batch, heads = header.batch, header.heads
        shape, taints = (batch, heads, header.features, header.width), batch * heads
        marks = self.receive(torch.empty(header.documents + taints, dtype=torch.int64, device=device), peer)
        segment, tainted = marks.split([header.documents, taints])
        sizes = [torch.Size(shape).numel(), taints if header.has_peak else 0]
        # What comes depends on tensors of another rank, of which autograd knows nothing: these stand for them.
        leaf = torch.empty(0, dtype=_DTYPES[header.dtype], device=device, requires_grad=bool(header.needs_gradient))
        with torch.set_grad_enabled(bool(header.needs_gradient)):
            floats = _Received.apply(self, peer, is_first, sum(sizes), leaf, *sources)
        state, peak = floats.split(sizes)
        return Memory(
            state.view(shape),
            peak.view(batch, heads) if header.has_peak else None,
            segment if header.documents else None,
            tainted.view(batch, heads).bool(),
        )

    def send(self, x: Tensor, peer: int) -> None:
        """Send a tensor, and wait for nobody."""
        guarded(lambda: self._under_way.append((dist.isend(x, group=self.group, group_dst=peer), x)))

    def receive(self, x: Tensor, peer: int) -> Tensor:
        """Wait for a tensor, and put it into ``x``."""
        guarded(lambda: dist.recv(x, group=self.group, group_src=peer))
        return x

    def wait(self) -> None:
        """Until all that was sent has been taken."""
        under_way, self._under_way = self._under_way, []
        for work, _ in under_way:
            guarded(work.wait)


def tied(out: Tensor, memory: Memory) -> Tensor:
    """``out`` as it is, from which autograd finds the memory, read or not: its sender waits for a gradient."""
    made: Tensor = _Tied.apply(out, memory.state)
    return made


class _Sent(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, out: Tensor, floats: Tensor, post: Post, peer: int) -> Tensor:
        ctx.post, ctx.peer, ctx.length = post, peer, len(floats)
        # What is saved is asked for first: where it was not kept (checkpointing), this runs the forward pass again, and
        # the peer may be waiting for what that sends.
        ctx.save_for_backward(floats.detach().new_empty(0))
        post.send(floats.detach().contiguous(), peer)
        return out.view_as(out)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        (like,) = ctx.saved_tensors
        return grad, ctx.post.receive(like.new_empty(ctx.length), ctx.peer), None, None


class _Tied(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, out: Tensor, state: Tensor) -> Tensor:
        ctx.shape, ctx.like = state.shape, state.detach().new_empty(0)
        return out.view_as(out)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor]:
        return grad, ctx.like.new_zeros(ctx.shape)


class _Received(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, post: Post, peer: int, is_first: bool, length: int, leaf: Tensor, *sources: Tensor) -> Tensor:
        ctx.post, ctx.peer, ctx.is_first, ctx.count = post, peer, is_first, 5 + len(sources)
        return post.receive(leaf.new_empty(length), peer)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[None, ...]:
        ctx.post.send(grad.contiguous(), ctx.peer)
        if ctx.is_first:  # nothing is left to do that a peer could wait for
            ctx.post.wait()
        return (None,) * ctx.count
