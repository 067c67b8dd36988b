"""StateSpaceMatrix: each channel's lower-triangular Toeplitz matrix, multiplied by through FFTs."""

from __future__ import annotations

import math
from collections.abc import Hashable, Iterator
from typing import NamedTuple

import torch
from torch import Tensor

from saccade.caches.recurrent import Memory
from saccade.matrix import Block
from saccade.mechanisms.features.mask_support import Visible
from saccade.mechanisms.features.sequence_order import Order, check_memory, rows_that_see
from saccade.mechanisms.linear_time import LinearTimeMatrix
from saccade.mechanisms.state_spaces.modes import Modes
from saccade.mechanisms.value_access import is_surely_finite
from saccade.support.torch_modes import without_autocast

__all__ = ["StateSpaceMatrix"]


class _Run(NamedTuple):
    """Tokens that follow one another in one text: of which batch items, and at which places."""

    items: slice
    places: Tensor | slice
    segment: int


class StateSpaceMatrix(LinearTimeMatrix):
    r"""A convolution as a matrix, one head for each channel: ``A_ij = kernel_{i-j}`` for j ≤ i of one text.

    Args:
        modes: of all channels.
        shape: (batch, channels, q_len, kv_len).
        visible: the mask, causal.
        dtype: of the inputs and of the products.
        device: of the inputs.
        source: equal for matrices of one state space.

    Cost: products take O(n log n) for each channel, and the kernel O(n * modes); rows are read off the kernel.
    """

    is_stochastic = False

    def __init__(
        self,
        modes: Modes,
        shape: tuple[int, int, int, int],
        visible: Visible,
        *,
        dtype: torch.dtype,
        device: torch.device,
        source: Hashable = None,
    ):
        super().__init__(shape, shape[1], dtype=dtype, device=device)
        self.modes, self.visible, self.source = modes, visible, source
        self._order = Order.of(visible, shape[2], shape[3])
        self._length = self._order.past + shape[2]

    @property
    def _wide(self) -> torch.dtype:
        return torch.float64 if self.dtype == torch.float64 else torch.float32

    def kernel(self, length: int | None = None) -> Tensor:
        """Return a channel's response to a single 1, ``[channels, length]``; as long as the keys when None."""
        return self.modes.kernel(self.shape[3] if length is None else length, self._wide)

    def rmatmul(self, x: Tensor) -> Tensor:
        """Return ``A.mT @ x``: the convolution from the last token to the first; see `Matrix.rmatmul`."""
        x = self._operand(x, "x", self.shape[1], self.shape[2])
        if not is_surely_finite(x):
            return super().rmatmul(x)  # who is touched by what is found pair by pair
        out = x.new_zeros(*self.shape[:2], self.shape[3], x.shape[3], dtype=self._wide)
        whole = torch.nn.functional.pad(x.to(self._wide), (0, 0, self._order.past, 0))
        if self.visible.hidden_rows is not None:
            hidden = torch.nn.functional.pad(self.visible.hidden_rows, (self._order.past, 0))
            whole = whole.masked_fill(hidden[:, None, :, None], 0.0)
        with without_autocast(self.device):
            for run in self._runs():
                part = whole[run.items][:, :, run.places].flip(2)
                out = _put(out, run, self._convolved(part).flip(2))
        return out.to(x.dtype)

    def advance(self, value: Tensor, memory: Memory | None) -> tuple[Tensor, Memory]:
        """Return the product for new tokens after a ``memory`` of all earlier ones, and the memory after them.

        Args:
            value: ``[batch, channels, len, value_dim]``.
            memory: ``Memory(state)``, real and imaginary parts ``[batch, channels, 2 * modes, value_dim]``; or None.
        """
        value = self._operand(value, "value", self.kv_heads, self.shape[3])
        count = 2 * self.modes.weight.shape[1]
        if memory is not None and memory.segment is None and self.visible.kv_documents is not None:
            memory = memory._replace(segment=self.visible.kv_documents[:, :1].flatten())
        check_memory(self, self._order, self.visible, memory, (count, value.shape[3]))
        batch, channels, _, width = value.shape
        bad = ~torch.isfinite(value.detach()).all(-1)
        if self.visible.hidden_keys is not None:
            bad = bad & ~self.visible.hidden_keys[:, None]
        clean = value.masked_fill(~torch.isfinite(value), 0.0).to(self._wide)
        state = clean.new_zeros(batch, channels, count, width) if memory is None else memory.state.to(self._wide)
        tainted = bad.new_zeros(batch, channels) if memory is None else memory.taints.clone()
        out, touched = torch.zeros_like(clean), bad.new_zeros(bad.shape)
        segment = None if memory is None else memory.segment
        with without_autocast(self.device):
            for run in self._runs():
                if segment is not None and run.segment != int(segment.expand(batch)[run.items][0]):
                    begin, was = torch.zeros_like(state[run.items]), bad.new_zeros(state[run.items].shape[:2])
                else:
                    begin, was = state[run.items], tainted[run.items]
                made, after = self._run(clean[run.items][:, :, run.places], begin)
                out = _put(out, run, made)
                seen = torch.cat([was[..., None], bad[run.items][:, :, run.places]], 2).int().cummax(2).values.bool()
                touched = _put(touched[..., None], run, seen[..., 1:, None])[..., 0]
                state, tainted = (_at(x, run.items, y) for x, y in ((state, after), (tainted, seen[..., -1])))
                segment = self._segment_after(segment, run, batch)
        out = out.masked_fill(touched[..., None], math.nan)
        return out.to(value.dtype), Memory(state, None, segment, tainted, self.source)

    def blocks(self, batch: int | None = None, head: int | None = None, rows: range | None = None) -> Iterator[Block]:
        kernel, (ranks, texts) = self.kernel(self._length), self._ranks()
        for items, heads, own in self._pieces(batch, head, rows):
            columns = range(self._order.past + own.stop)
            places = slice(self._order.past + own.start, self._order.past + own.stop)
            rank, text = (x[items] if len(x) > 1 else x for x in (ranks, texts))
            lags = rank[:, places, None] - rank[:, None, : columns.stop]
            seen = self.visible.allowed(items, own, columns)
            weights = kernel[heads][:, lags.clamp(min=0)].movedim(0, 1)  # [batch | 1, heads, rows, columns]
            together = (text[:, places, None] == text[:, None, : columns.stop]) & (lags >= 0)
            seen = seen & together[:, None] & self._there(items)[:, None, places, None]
            weights = weights.masked_fill(~seen, 0.0)
            yield Block(items, heads, own, (columns,), weights.expand(items.stop - items.start, -1, -1, -1))

    def _times(self, value: Tensor) -> Tensor:
        bad = None
        if not is_surely_finite(value):
            bad = ~torch.isfinite(value.detach()).all(-1)
            value = value.masked_fill(bad[..., None], 0.0)
        whole = value.to(self._wide)
        out = whole.new_zeros(*self.shape[:2], self._length, value.shape[3])
        for run in self._runs():
            out = _put(out, run, self._convolved(whole[run.items][:, :, run.places]))
        out, hidden = out[:, :, self._order.past :], self.visible.hidden_rows
        if bad is not None:
            out = out.masked_fill(rows_that_see(self, self._order, self.visible, bad)[..., None], math.nan)
        there = self._there(slice(None))[:, self._order.past :]
        there = there if hidden is None else there & ~hidden
        return out.masked_fill(~there[:, None, :, None], 0.0)

    def _convolved(self, value: Tensor) -> Tensor:
        """Return the outputs for tokens ``[batch, channels, len, width]`` of one sequence from its start on."""
        found = self.modes.convolve(value.movedim(3, 1).flatten(0, 1))
        return found.unflatten(0, (value.shape[0], value.shape[3])).movedim(1, 3)

    def _run(self, value: Tensor, state: Tensor) -> tuple[Tensor, Tensor]:
        """Return outputs for tokens ``[batch, channels, len, width]`` after a state; each column is its own batch."""
        batch, _, _, width = value.shape
        columns = value.movedim(3, 1).flatten(0, 1)  # [batch * width, channels, len]
        parts = state.movedim(3, 1).flatten(0, 1).unflatten(2, (2, -1))
        made, after = self.modes.run(columns, torch.complex(parts[:, :, 0], parts[:, :, 1]))
        after = torch.cat([after.real, after.imag], 2)
        return tuple(x.unflatten(0, (batch, width)).movedim(1, 3) for x in (made, after))

    def _ranks(self) -> tuple[Tensor, Tensor]:
        """Return the index of each token in its sequence, without hidden ones, and its sequence: int64 ``[batch | 1,
        length]``.
        """
        texts, there = self.visible.kv_documents, self._there(slice(None))
        texts = torch.zeros_like(there[:1], dtype=torch.int64) if texts is None else texts[:, : self._length]
        return there.long().cumsum(1) - 1, texts  # only differences within a text count

    def _there(self, items: slice) -> Tensor:
        """Return tokens that are visible, bool ``[batch | 1, length]``: others take no time, write and read nothing."""
        hidden = self.visible.hidden_keys
        if hidden is None:
            return torch.ones(1, self._length, dtype=torch.bool, device=self.device)
        return ~(hidden if len(hidden) == 1 else hidden[items])[:, : self._length]

    def _runs(self) -> Iterator[_Run]:
        """Yield the sequences of each batch item, without hidden tokens; all items at once if nothing distinguishes
        them.
        """
        hidden, texts = self.visible.hidden_keys, self.visible.kv_documents
        if not self._length:
            return
        if hidden is None and texts is None:
            yield _Run(slice(None), slice(0, self._length), 0)
            return
        for item in range(self.shape[0]):
            places = self._there(slice(item, item + 1))[0].nonzero()[:, 0]
            if texts is None:
                yield _Run(slice(item, item + 1), places, 0)
                continue
            own = texts[item if len(texts) > 1 else 0, : self._length][places]
            for segment in own.unique(sorted=True).tolist():
                yield _Run(slice(item, item + 1), places[own == segment], segment)

    def _segment_after(self, segment: Tensor | None, run: _Run, batch: int) -> Tensor | None:
        """Return the sequence of the last token of each item, after a run."""
        if self.visible.kv_documents is None:
            return None
        known = self.visible.kv_documents[:, 0] if segment is None else segment
        whole = known.expand(batch).clone()
        whole[run.items] = run.segment
        return whole


def _put(whole: Tensor, run: _Run, part: Tensor) -> Tensor:
    """Return ``[batch, channels, len, width]`` with the tokens of a run replaced; nothing is written in place."""
    if run.items == slice(None) and part.shape[2] == whole.shape[2]:
        return part
    places = run.places
    if isinstance(places, slice):
        places = torch.arange(places.start, places.stop, device=whole.device)
    return _at(whole, run.items, whole[run.items].index_copy(2, places, part))


def _at(whole: Tensor, items: slice, part: Tensor) -> Tensor:
    if items == slice(None):
        return part
    return torch.cat([whole[: items.start], part, whole[items.stop :]])
