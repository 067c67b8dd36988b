"""Pass recurrent states from rank to rank, and pass their gradients back."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple, cast

import torch
import torch.distributed as dist
from torch import Tensor
from torch.autograd.function import once_differentiable

from saccade.caches.recurrent import Memory
from saccade.distributed.collectives import with_hint
from saccade.distributed.layouts import ContiguousRun
from saccade.matrix import Matrix
from saccade.mechanisms.recurrences.recurrence_matrix import RecurrenceMatrix
from saccade.positions.token_positions import Positions
from saccade.statistics.row_block import Block
from saccade.support.errors import unsupported

_DTYPES = (torch.float32, torch.float64)
_PARTS = 8  # groups of heads: the next rank starts on the first group while this rank computes the second


class _Header(NamedTuple):
    """The header sent before a recurrent state: the state's sizes and dtype as int64 numbers.

    Attributes:
        batch, heads, features, width: sizes of the state.
        has_peak: 1 if the state has a peak (`Memory.peak`).
        documents: number of items in `Memory.segment`; 0 if there is none.
        dtype: index of the state's dtype in `_DTYPES`.
        needs_gradient: 1 if a gradient must be sent back.
    """

    batch: int
    heads: int
    features: int
    width: int
    has_peak: int
    documents: int
    dtype: int
    needs_gradient: int


class StateChannel:
    """A channel that transfers recurrent states between ranks.

    A rank waits for its sends only at the end of a pass, because the receiver may be sending at the same time.

    Args:
        group: the process group of the ranks.
    """

    def __init__(self, group: dist.ProcessGroup | None):
        self.group = group
        self._pending_sends: list[tuple[Any, Tensor]] = []

    def send_state(self, out: Tensor, memory: Memory, peer: int) -> Tensor:
        """Send a recurrent state to a rank; return ``out`` with a backward pass that receives the state's gradient.

        Args:
            out: the output of the earlier tokens; its backward pass waits for the peer's gradient.
            memory: the state after all tokens so far.
            peer: the next rank, numbered within the group.
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
        tied_out: Tensor = _Sent.apply(out, floats, self, peer)
        return tied_out

    def receive_state(
        self, peer: int, device: torch.device, sources: Sequence[Tensor] = (), *, is_first: bool = False
    ) -> Memory:
        """Receive a recurrent state from a peer; the backward pass sends its gradient back.

        Args:
            peer: the rank with the previous tokens, numbered within the group.
            device: the device of the state.
            sources: tensors of the receiving rank; a backward pass to any of them sends the gradient.
            is_first: whether this is the first state that the rank receives; its gradient is then sent last.
        """
        numbers = torch.empty(len(_Header._fields), dtype=torch.int64, device=device)
        header = _Header(*self.receive(numbers, peer).tolist())
        batch, heads = header.batch, header.heads
        shape, taints = (batch, heads, header.features, header.width), batch * heads
        marks = self.receive(torch.empty(header.documents + taints, dtype=torch.int64, device=device), peer)
        segment, tainted = marks.split([header.documents, taints])
        sizes = [torch.Size(shape).numel(), taints if header.has_peak else 0]
        # The memory depends on tensors of another rank, which autograd cannot see; these tensors represent them.
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
        """Start sending a tensor to another rank, without waiting for its arrival."""
        with_hint(lambda: self._pending_sends.append((dist.isend(x, group=self.group, group_dst=peer), x)))

    def receive(self, x: Tensor, peer: int) -> Tensor:
        """Wait for a tensor from another rank, and write it into ``x``."""
        with_hint(lambda: dist.recv(x, group=self.group, group_src=peer))
        return x

    def wait(self) -> None:
        """Wait until every tensor that this rank sent has been received."""
        pending, self._pending_sends = self._pending_sends, []
        for work, _ in pending:
            with_hint(work.wait)


def tied(out: Tensor, memory: Memory) -> Tensor:
    """Make ``out`` depend on a received state in autograd, so that the sender of the state gets its gradient."""
    tied_out: Tensor = _Tied.apply(out, memory.state)
    return tied_out


class _Sent(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, out: Tensor, floats: Tensor, channel: StateChannel, peer: int) -> Tensor:
        ctx.channel, ctx.peer, ctx.length = channel, peer, len(floats)
        # The backward pass reads this saved tensor first. Under checkpointing, reading it repeats the forward pass, and
        # the peer may be waiting for the tensors that the forward pass sends.
        ctx.save_for_backward(floats.detach().new_empty(0))
        channel.send(floats.detach().contiguous(), peer)
        return out.view_as(out)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        (like,) = ctx.saved_tensors
        return grad, ctx.channel.receive(like.new_empty(ctx.length), ctx.peer), None, None


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
    def forward(
        ctx: Any, channel: StateChannel, peer: int, is_first: bool, length: int, leaf: Tensor, *sources: Tensor
    ) -> Tensor:
        ctx.channel, ctx.peer, ctx.is_first, ctx.count = channel, peer, is_first, 5 + len(sources)
        return channel.receive(leaf.new_empty(length), peer)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[None, ...]:
        ctx.channel.send(grad.contiguous(), ctx.peer)
        if ctx.is_first:  # this was the last gradient to send
            ctx.channel.wait()
        return (None,) * ctx.count


class CarriedMatrix(Matrix):
    """This rank's rows of a recurrence or causal linear attention, continued from the previous rank's state.

    Args:
        make: a function that maps a slice of local rows and their positions to a matrix.
        runs: runs of consecutive local rows, in order.
        shape: (batch, heads, local rows, tokens of the full sequence).
        channel: the channel that transfers states between ranks.
        like: a matrix without rows, as a template.
        sources: tensors from which the matrix is computed.

    Cost: a matrix product as on one machine. For each run, one state of ``kv_heads * head_dim * value_dim`` numbers is
    received and one is sent. Each rank waits for the previous rank; if the matrix can be split by heads, it waits only
    until the previous rank has computed the first group of heads.
    """

    is_stochastic = False

    def __init__(
        self,
        make: Callable[[slice, Positions], Matrix],
        runs: tuple[ContiguousRun, ...],
        shape: tuple[int, int, int, int],
        channel: StateChannel,
        like: Matrix,
        sources: Sequence[Tensor],
    ):
        self._make, self._runs, self._channel = make, runs, channel
        self._shape, self._like, self._sources = shape, like, sources

    @property
    def shape(self) -> tuple[int, int, int, int]:
        return self._shape

    @property
    def dtype(self) -> torch.dtype:
        return self._like.dtype

    @property
    def device(self) -> torch.device:
        return self._like.device

    @property
    def kv_heads(self) -> int:
        return self._like.kv_heads

    def blocks(self, batch: int | None = None, head: int | None = None, rows: range | None = None) -> Iterator[Block]:
        """Raise an error, because the weights of keys on other ranks are not available on this rank."""
        reason = "over ranks, a state summarizes all earlier keys, so individual weights are not available"
        raise unsupported("weights", [reason], hint="use one process: mechanism(query, key)")

    def matmul(self, value: Tensor, *, dropout_p: float = 0.0, seed: int | None = None) -> Tensor:
        """Return the output of this rank's rows, computed from their values and the state received for earlier rows."""
        if dropout_p:
            reason = "dropout_p is not 0, and individual weights of earlier tokens cannot be dropped from a sum"
            raise unsupported(type(self._like).__name__, [reason])
        rows = [self._rows_of_run(run, value[:, :, run.rows]) for run in self._runs]
        self._channel.wait()
        if not rows:  # an empty result that is part of the graph, as on other ranks
            return value.new_zeros(*self.shape[:3], value.shape[3]) + value.sum()
        return torch.cat(rows, 2)

    def _rows_of_run(self, run: ContiguousRun, value: Tensor) -> Tensor:
        """Receive the state before a run of consecutive tokens, and return the output of the run."""
        channel, matrix = self._channel, cast("Any", self._make(run.rows, Positions(run.tokens)))
        is_alone, is_first = run.before is run.after is None, run.rows.start == 0
        out: list[Tensor] = []
        for part, part_value in [(matrix, value)] if is_alone else _by_heads(matrix, value):
            memory = None
            if run.before is not None:
                sources = (*self._sources, value)
                memory = channel.receive_state(run.before, value.device, sources, is_first=is_first and not out)
                memory = memory._replace(source=part.source)
            read, after = part.advance(part_value, memory)
            read = read if memory is None else tied(read, memory)
            out.append(read if run.after is None else channel.send_state(read, after, run.after))
        return torch.cat(out, 1)


def _by_heads(matrix: Any, value: Tensor) -> Iterator[tuple[Any, Tensor]]:
    """Yield a recurrence matrix and its values in groups of heads, or all at once if it cannot be split by heads."""
    heads = matrix.shape[1]
    if not isinstance(matrix, RecurrenceMatrix):
        yield matrix, value
        return
    for part in torch.arange(heads).tensor_split(min(_PARTS, heads)):
        numbers = part.tolist()
        yield matrix.of_heads(numbers), value[:, [head * value.shape[1] // heads for head in numbers]]
