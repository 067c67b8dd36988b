"""Collectives that exchange rows between ranks, and send their gradients in the opposite direction."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor

from saccade.distributed.exchange_plan import Exchange
from saccade.distributed.layouts import Layout, positions_in
from saccade.support.called_function import called_function

# With more ranks, only ranks that have data for each other exchange messages. All ranks must use the same method.
_MANY = 8


def apply_exchange(x: Tensor, forward: Callable[[Tensor], Tensor], backward: Callable[[Tensor], Tensor]) -> Tensor:
    """Apply ``forward``, a linear exchange between ranks, and use its transpose ``backward`` in the backward pass."""
    result: Tensor = _LinearExchange.apply(x, forward, backward)
    return result


class _LinearExchange(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, run: Callable[[Tensor], Tensor], transpose: Callable[[Tensor], Tensor]) -> Tensor:
        ctx.run, ctx.transpose = run, transpose
        return run(x)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:
        return apply_exchange(grad.contiguous(), ctx.transpose, ctx.run), None, None


class Fetch(NamedTuple):
    """A collective that fetches the keys visible to the local queries from other ranks, in order of position.

    Attributes:
        group: the process group of the ranks.
        columns: positions of the local and fetched keys, int64 ``[columns]``.
        local_columns: indices in ``columns`` of the local rows, int64 ``[rows]``.
        send_rows: for each rank, the indices of the local rows sent to it, int64.
        receive_columns: for each rank, the indices in ``columns`` of the keys received from it, int64.
    """

    group: dist.ProcessGroup | None
    columns: Tensor
    local_columns: Tensor
    send_rows: tuple[Tensor, ...]
    receive_columns: tuple[Tensor, ...]

    @classmethod
    def of(cls, plan: Exchange, rank: int, group: dist.ProcessGroup | None, device: torch.device) -> Fetch:
        """Build the collective that fetches the keys one rank needs according to an exchange plan."""
        part = plan.rank(rank)
        rows, columns = plan.layout.tokens(rank), part.columns

        def by_peer(pieces: Sequence[tuple[int, range]], among: np.ndarray) -> tuple[Tensor, ...]:
            lists: list[list[range]] = [[] for _ in range(plan.ranks)]
            for peer, keys in pieces:
                lists[peer].append(keys)
            return tuple(torch.from_numpy(np.searchsorted(among, positions_in(keys))).to(device) for keys in lists)

        positions = torch.from_numpy(np.searchsorted(columns, rows)).to(device)
        send_rows, receive_columns = by_peer(part.sends, rows), by_peer(part.receives, columns)
        return cls(group, torch.from_numpy(columns).to(device), positions, send_rows, receive_columns)

    def __call__(self, x: Tensor) -> Tensor:
        """Return the local rows ``[B, G, rows, D]`` together with the fetched rows, ``[B, G, columns, D]``."""
        return apply_exchange(x, self._fetch_rows, self._return_gradients)

    def _fetch_rows(self, x: Tensor) -> Tensor:
        batch, groups, _, width = x.shape
        out = x.new_empty(batch, groups, len(self.columns), width)
        out[:, :, self.local_columns] = x
        shapes = [(batch, groups, len(part), width) for part in self.receive_columns]
        received = _all_to_all([x[:, :, part] for part in self.send_rows], shapes, self.group)
        for part, rows in zip(self.receive_columns, received, strict=True):
            out[:, :, part] = rows
        return out

    def _return_gradients(self, grad: Tensor) -> Tensor:
        batch, groups, _, width = grad.shape
        wide = torch.promote_types(grad.dtype, torch.float32)  # several ranks add to the same key: round only once
        total = grad[:, :, self.local_columns].to(wide)
        shapes = [(batch, groups, len(part), width) for part in self.send_rows]
        received = _all_to_all([grad[:, :, part] for part in self.receive_columns], shapes, self.group)
        for part, rows in zip(self.send_rows, received, strict=True):
            total.index_add_(2, part, rows.to(wide))
        return total.to(grad.dtype)


class Swap(NamedTuple):
    """An all-to-all that exchanges the local rows of all heads for all rows of the local heads, and back.

    Attributes:
        group: the process group of the ranks.
        rows: positions of the rows of each rank, int64.
    """

    group: dist.ProcessGroup | None
    rows: tuple[Tensor, ...]

    @classmethod
    def of(cls, layout: Layout, group: dist.ProcessGroup | None, device: torch.device) -> Swap:
        """Build the all-to-all exchange for a layout, which must be the same on all ranks."""
        rows = (torch.from_numpy(layout.tokens(rank)).to(device) for rank in range(layout.ranks))
        return cls(group, tuple(rows))

    def to_heads(self, x: Tensor) -> Tensor:
        """Exchange rows for heads, from ``[B, H, rows, D]`` to ``[B, H / ranks, all rows, D]``."""
        return apply_exchange(x, self._to_heads, self._to_rows)

    def to_rows(self, x: Tensor) -> Tensor:
        """Exchange heads for rows, from ``[B, H / ranks, all rows, D]`` to ``[B, H, rows, D]``."""
        return apply_exchange(x, self._to_rows, self._to_heads)

    def _to_heads(self, x: Tensor) -> Tensor:
        batch, heads, _, width = x.shape
        local = heads // len(self.rows)
        shapes = [(batch, local, len(rows), width) for rows in self.rows]
        received = _all_to_all(list(x.split(local, 1)), shapes, self.group)
        out = x.new_empty(batch, local, sum(map(len, self.rows)), width)
        for rows, part in zip(self.rows, received, strict=True):
            out[:, :, rows] = part
        return out

    def _to_rows(self, x: Tensor) -> Tensor:
        batch, heads, _, width = x.shape
        local = len(self.rows[dist.get_rank(self.group)])
        shapes = [(batch, heads, local, width)] * len(self.rows)
        return torch.cat(_all_to_all([x[:, :, rows] for rows in self.rows], shapes, self.group), 1)


def check_agreement(plan: str, group: dist.ProcessGroup | None, device: torch.device) -> None:
    """Raise an error on every rank, before anything is sent, unless all ranks have the same exchange plan.

    With different plans, a rank could receive a message of the wrong size without an error, or wait forever.

    Raises:
        RuntimeError: some ranks have a different plan or different shapes, or a rank has ended.
    """
    ranks = dist.get_world_size(group)
    digest = int.from_bytes(hashlib.sha256(plan.encode()).digest()[:7], "little")
    sent = torch.tensor([digest], device=device)
    every = [torch.empty_like(sent) for _ in range(ranks)]
    with_hint(lambda: dist.all_gather(every, sent, group=group))
    digests = [int(digest) for digest in every]
    others = [rank for rank, digest in enumerate(digests) if digest != digests[0]]
    if others:
        listed = ", ".join(map(str, others[:8])) + (", ..." if len(others) > 8 else "")
        sentence = f"{called_function()}: all ranks must make the same plan; ranks {listed} differ from rank 0"
        raise RuntimeError(
            f"{sentence} (here: {plan}).\nHint: give every rank the same mask, lengths, layout and dtype"
        )


def _all_to_all(
    parts: Sequence[Tensor], shapes: Sequence[tuple[int, ...]], group: dist.ProcessGroup | None
) -> list[Tensor]:
    """Send one tensor to each rank, and return the tensors received from all ranks, with the shapes ``shapes``."""
    ranks, rank = len(parts), dist.get_rank(group)
    like, peers = parts[rank], [peer for peer in range(ranks) if peer != rank]
    if ranks > _MANY:
        received = [parts[rank] if peer == rank else like.new_empty(shapes[peer]) for peer in range(ranks)]
        operations = []
        for peer in peers:
            number = dist.get_global_rank(group, peer) if group is not None else peer
            if parts[peer].numel():
                operations.append(dist.P2POp(dist.isend, parts[peer].contiguous(), number, group))
            if received[peer].numel():
                operations.append(dist.P2POp(dist.irecv, received[peer], number, group))
        if operations:
            with_hint(lambda: [work.wait() for work in dist.batch_isend_irecv(operations)])
        return received
    sizes = [torch.Size(shape).numel() for shape in shapes]
    flat = like.new_empty(sum(sizes))
    sent = torch.cat([part.reshape(-1) for part in parts])
    with_hint(lambda: dist.all_to_all_single(flat, sent, sizes, [part.numel() for part in parts], group=group))
    return [part.view(shape) for part, shape in zip(flat.split(sizes), shapes, strict=True)]


def with_hint(call: Callable[[], object]) -> None:
    """Run a collective; if it fails, raise an error that explains the likely cause."""
    try:
        call()
    except RuntimeError as error:
        sentence = (
            "saccade.distributed: an exchange did not finish: another rank has exited, is late, or has raised an error"
        )
        raise RuntimeError(f"{sentence}.\nHint: look at the other ranks' errors first ({error})") from error
