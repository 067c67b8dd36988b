"""StateSpaceMatrix: a diagonal state space as a lazy matrix, together with its modes."""

from __future__ import annotations

import math
from collections.abc import Hashable, Iterator
from typing import NamedTuple

import torch
from torch import Tensor

from saccade.caches.recurrent import Memory
from saccade.matrix import Block, Matrix
from saccade.matrix.uniform_matrix import UniformMatrix
from saccade.mechanisms.features.mask_support import Visible
from saccade.mechanisms.features.sequence_order import Order, check_memory, rows_that_see
from saccade.mechanisms.linear_time import LinearTimeMatrix
from saccade.mechanisms.readable_tensors import is_surely_finite
from saccade.support.torch_modes import without_autocast


class _Sequence(NamedTuple):
    """The tokens that one convolution runs over.

    Attributes:
        items: the batch items.
        tokens: the unmasked tokens of these items that belong to the sequence.
        segment: the document of the tokens; 0 if there are no documents.
    """

    items: slice
    tokens: Tensor | slice
    segment: int


class StateSpaceMatrix(LinearTimeMatrix):
    r"""The convolution of a state space as a lazy matrix: ``A_ij = kernel_{i-j}`` for j ≤ i in one sequence.

    Args:
        modes: the modes of all channels.
        shape: (batch, channels, q_len, kv_len).
        visible: the mask, which is causal.
        dtype: dtype of the inputs and of matrix products.
        device: device of the inputs.
        source: identifies the kind of state space. A recurrent state is accepted only from an equal source.

    Cost: products take O(n log n) time for each channel, and the kernel O(n * modes). Rows are copied from the kernel.
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
        """Return each channel's impulse response, ``[channels, length]``; by default, it has an entry for each key."""
        return self.modes.kernel(self.shape[3] if length is None else length, self._wide)

    def rmatmul(self, x: Tensor) -> Tensor:
        """Return ``A.mT @ x``, a convolution from the last token to the first; see `Matrix.rmatmul`."""
        x = self._operand(x, "x", self.shape[1], self.shape[2])
        if not is_surely_finite(x):
            return super().rmatmul(x)  # find the affected rows pair by pair
        out = x.new_zeros(*self.shape[:2], self.shape[3], x.shape[3], dtype=self._wide)
        whole = torch.nn.functional.pad(x.to(self._wide), (0, 0, self._order.past, 0))
        if self.visible.hidden_rows is not None:
            hidden = torch.nn.functional.pad(self.visible.hidden_rows, (self._order.past, 0))
            whole = whole.masked_fill(hidden[:, None, :, None], 0.0)
        with without_autocast(self.device):
            for sequence in self._sequences():
                part = whole[sequence.items][:, :, sequence.tokens].flip(2)
                out = _replace_sequence(out, sequence, self._convolve(part).flip(2))
        return out.to(x.dtype)

    def advance(self, value: Tensor, memory: Memory | None) -> tuple[Tensor, Memory]:
        """Return the output for new tokens and the state after them; ``memory`` is the state before them.

        Args:
            value: ``[batch, channels, len, value_dim]``.
            memory: ``Memory(state)`` with the real and imaginary parts of the state, ``[batch, channels, 2 * modes,
                value_dim]``; None for zeros.
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
            for sequence in self._sequences():
                if segment is not None and sequence.segment != int(segment.expand(batch)[sequence.items][0]):
                    begin = torch.zeros_like(state[sequence.items])
                    was_tainted = bad.new_zeros(begin.shape[:2])
                else:
                    begin, was_tainted = state[sequence.items], tainted[sequence.items]
                product, after = self._run(clean[sequence.items][:, :, sequence.tokens], begin)
                out = _replace_sequence(out, sequence, product)
                follows_bad = (
                    torch.cat([was_tainted[..., None], bad[sequence.items][:, :, sequence.tokens]], 2)
                    .int()
                    .cummax(2)
                    .values.bool()
                )
                touched = _replace_sequence(touched[..., None], sequence, follows_bad[..., 1:, None])[..., 0]
                state, tainted = (
                    _replace_items(x, sequence.items, y) for x, y in ((state, after), (tainted, follows_bad[..., -1]))
                )
                segment = self._segment_after(segment, sequence, batch)
        out = out.masked_fill(touched[..., None], math.nan)
        return out.to(value.dtype), Memory(state, None, segment, tainted, self.source)

    def uniform(self) -> Matrix:
        return UniformMatrix(self, self.visible.in_block)

    def blocks(self, batch: int | None = None, head: int | None = None, rows: range | None = None) -> Iterator[Block]:
        kernel, (ranks, documents) = self.kernel(self._length), self._ranks()
        for items, heads, span in self._pieces(batch, head, rows):
            columns = range(self._order.past + span.stop)
            row_tokens = slice(self._order.past + span.start, self._order.past + span.stop)
            rank, document = (x[items] if len(x) > 1 else x for x in (ranks, documents))
            lags = rank[:, row_tokens, None] - rank[:, None, : columns.stop]
            allowed = self.visible.allowed(items, span, columns)
            weights = kernel[heads][:, lags.clamp(min=0)].movedim(0, 1)  # [batch | 1, heads, rows, columns]
            together = (document[:, row_tokens, None] == document[:, None, : columns.stop]) & (lags >= 0)
            allowed = allowed & together[:, None] & self._visible_tokens(items)[:, None, row_tokens, None]
            weights = weights.masked_fill(~allowed, 0.0)
            yield Block(items, heads, span, (columns,), weights.expand(items.stop - items.start, -1, -1, -1))

    def _times(self, value: Tensor) -> Tensor:
        bad = None
        if not is_surely_finite(value):
            bad = ~torch.isfinite(value.detach()).all(-1)
            value = value.masked_fill(bad[..., None], 0.0)
        whole = value.to(self._wide)
        out = whole.new_zeros(*self.shape[:2], self._length, value.shape[3])
        for sequence in self._sequences():
            out = _replace_sequence(out, sequence, self._convolve(whole[sequence.items][:, :, sequence.tokens]))
        out, hidden = out[:, :, self._order.past :], self.visible.hidden_rows
        if bad is not None:
            out = out.masked_fill(rows_that_see(self, self._order, self.visible, bad)[..., None], math.nan)
        is_visible = self._visible_tokens(slice(None))[:, self._order.past :]
        is_visible = is_visible if hidden is None else is_visible & ~hidden
        return out.masked_fill(~is_visible[:, None, :, None], 0.0)

    def _convolve(self, value: Tensor) -> Tensor:
        """Return the outputs for tokens ``[batch, channels, len, width]`` at the start of a sequence."""
        out = self.modes.convolve(value.movedim(3, 1).flatten(0, 1))
        return out.unflatten(0, (value.shape[0], value.shape[3])).movedim(1, 3)

    def _run(self, value: Tensor, state: Tensor) -> tuple[Tensor, Tensor]:
        """Return the outputs for tokens ``[batch, channels, len, width]`` that follow a state, and the new state."""
        batch, _, _, width = value.shape
        columns = value.movedim(3, 1).flatten(0, 1)  # [batch * width, channels, len]
        parts = state.movedim(3, 1).flatten(0, 1).unflatten(2, (2, -1))
        out, after = self.modes.run(columns, torch.complex(parts[:, :, 0], parts[:, :, 1]))
        after = torch.cat([after.real, after.imag], 2)
        return tuple(x.unflatten(0, (batch, width)).movedim(1, 3) for x in (out, after))

    def _ranks(self) -> tuple[Tensor, Tensor]:
        """Return each token's index among the visible tokens, and its document, int64 ``[batch | 1, length]`` each."""
        documents, is_visible = self.visible.kv_documents, self._visible_tokens(slice(None))
        documents = (
            torch.zeros_like(is_visible[:1], dtype=torch.int64) if documents is None else documents[:, : self._length]
        )
        return is_visible.long().cumsum(1) - 1, documents  # only differences within a sequence matter

    def _visible_tokens(self, items: slice) -> Tensor:
        """Return which tokens are visible, bool ``[batch | 1, length]``. Masked tokens do not advance the state."""
        hidden = self.visible.hidden_keys
        if hidden is None:
            return torch.ones(1, self._length, dtype=torch.bool, device=self.device)
        return ~(hidden if len(hidden) == 1 else hidden[items])[:, : self._length]

    def _sequences(self) -> Iterator[_Sequence]:
        """Yield the visible tokens of each sequence: of all items at once if nothing is masked, or item by item."""
        hidden, documents = self.visible.hidden_keys, self.visible.kv_documents
        if not self._length:
            return
        if hidden is None and documents is None:
            yield _Sequence(slice(None), slice(0, self._length), 0)
            return
        for item in range(self.shape[0]):
            tokens = self._visible_tokens(slice(item, item + 1))[0].nonzero()[:, 0]
            if documents is None:
                yield _Sequence(slice(item, item + 1), tokens, 0)
                continue
            document = documents[item if len(documents) > 1 else 0, : self._length][tokens]
            for segment in document.unique(sorted=True).tolist():
                yield _Sequence(slice(item, item + 1), tokens[document == segment], segment)

    def _segment_after(self, segment: Tensor | None, sequence: _Sequence, batch: int) -> Tensor | None:
        """Return the document to which each item's state belongs after a sequence of tokens."""
        if self.visible.kv_documents is None:
            return None
        known = self.visible.kv_documents[:, 0] if segment is None else segment
        whole = known.expand(batch).clone()
        whole[sequence.items] = sequence.segment
        return whole


def _replace_sequence(whole: Tensor, sequence: _Sequence, part: Tensor) -> Tensor:
    """Replace the entries of a sequence of tokens in ``[batch, channels, len, width]``, without writing in place."""
    if sequence.items == slice(None) and part.shape[2] == whole.shape[2]:
        return part
    tokens = sequence.tokens
    if isinstance(tokens, slice):
        tokens = torch.arange(tokens.start, tokens.stop, device=whole.device)
    return _replace_items(whole, sequence.items, whole[sequence.items].index_copy(2, tokens, part))


def _replace_items(whole: Tensor, items: slice, part: Tensor) -> Tensor:
    if items == slice(None):
        return part
    return torch.cat([whole[: items.start], part, whole[items.stop :]])


_BLOCK = 256  # number of tokens added to a state in one product
_PIECE = 4096  # number of tokens convolved in one FFT; earlier tokens contribute through the state
_FEW = 8  # up to this number of tokens, individual steps cost less than products


class Modes(NamedTuple):
    r"""The modes of a state space: ``x_t = a x_{t-1} + u_t``, ``y_t = 2 Re(c · x_t) + d u_t`` for every channel.

    Attributes:
        log_factor: ``log a``, complex ``[channels, modes]``, in the widest dtype of the device, because large powers
            rotate by large angles.
        weight: c, complex ``[channels, modes]``.
        skip: d, ``[channels]``.
    """

    log_factor: Tensor
    weight: Tensor
    skip: Tensor

    def kernel(self, length: int, dtype: torch.dtype) -> Tensor:
        """Return each channel's impulse response, ``[channels, length]``, using two short tables of powers of ``a``."""
        if not length:
            return self.skip.new_zeros(len(self.skip), 0, dtype=dtype)
        width = max(1, math.isqrt(length - 1) + 1)
        near, far = self._powers(torch.arange(width)), self._powers(torch.arange(-(-length // width)) * width)
        wide = torch.complex128 if dtype == torch.float64 else torch.complex64
        rows = (far * self.weight).to(wide).movedim(0, 1) @ near.to(wide).movedim(0, 1).mT
        response = 2.0 * rows.real.flatten(1)[:, :length]
        return torch.cat([response[:, :1] + self.skip[:, None].to(dtype), response[:, 1:]], 1)

    def advance(self, value: Tensor, state: Tensor, powers: Tensor) -> tuple[Tensor, Tensor]:
        """Return the part of the outputs that comes from the incoming state, and the state after the new tokens.

        Args:
            value: ``[batch, channels, len]``.
            state: complex ``[batch, channels, modes]``.
            powers: powers of ``a`` from 0 to 256, or to the number of tokens if that is smaller, ``[channels, powers,
                modes]``, in the dtype of the state.

        Returns:
            The part of the outputs, ``[batch, channels, len]``, and the new state.
        """
        length, added, incoming = value.shape[2], [], state
        whole = length - length % _BLOCK
        for part in (value[:, :, :whole], value[:, :, whole:]):
            if not part.shape[2]:
                continue
            count = min(part.shape[2], _BLOCK)
            blocks = part.unflatten(2, (-1, count))
            reached = blocks @ torch.view_as_real(powers[:, :count].flip(1)).flatten(2)
            reached = torch.view_as_complex(reached.unflatten(3, (-1, 2)))
            states = []
            for i in range(blocks.shape[2]):
                states.append(incoming)
                incoming, state = powers[:, count] * incoming, powers[:, count] * state + reached[:, :, i]
            decayed = torch.view_as_real(
                (powers[:, 1 : count + 1] * self.weight.to(state.dtype)[:, None]).conj_physical()
            )
            read = torch.view_as_real(torch.stack(states, 2)).flatten(3) @ decayed.flatten(2).mT
            added.append(2.0 * read.flatten(2))
        return (torch.cat(added, 2) if added else value), state

    def step(self, value: Tensor, state: Tensor) -> tuple[Tensor, Tensor]:
        """Return all outputs and the new state, computed token by token; see `advance` for the arguments."""
        factor, weight, out = self.log_factor.exp().to(state.dtype), self.weight.to(state.dtype), []
        for x in value.unbind(2):
            state = factor * state + x[..., None]
            out.append(2.0 * (weight * state).real.sum(-1) + self.skip.to(x.dtype) * x)
        return (torch.stack(out, 2) if out else value), state

    def run(self, value: Tensor, state: Tensor) -> tuple[Tensor, Tensor]:
        """Return all outputs and the new state, computed with one FFT per chunk, or token by token if faster."""
        if value.shape[2] <= _FEW:
            return self.step(value, state)
        kernel, out = self.kernel(min(value.shape[2], _PIECE), value.dtype), []
        powers = self._powers(torch.arange(min(value.shape[2], _BLOCK) + 1)).to(state.dtype).movedim(0, 1)
        for part in value.split(_PIECE, 2):
            added, state = self.advance(part, state, powers)
            out.append(convolved(kernel[:, : part.shape[2]], part) + added)
        return torch.cat(out, 2), state

    def convolve(self, x: Tensor) -> Tensor:
        """Return the outputs for an incoming state of 0, ``[batch, channels, len]``."""
        if x.shape[2] <= _PIECE:
            return convolved(self.kernel(x.shape[2], x.dtype), x)
        wide = torch.complex128 if x.dtype == torch.float64 else torch.complex64
        return self.run(x, torch.zeros(*x.shape[:2], self.weight.shape[1], dtype=wide, device=x.device))[0]

    def _powers(self, exponents: Tensor) -> Tensor:
        """Return powers of the modes' factors, complex128 ``[powers, channels, modes]``."""
        exponents = exponents.to(self.log_factor.device, torch.float64)
        return (self.log_factor * exponents[:, None, None]).exp()


def convolved(kernel: Tensor, x: Tensor) -> Tensor:
    """Return the causal convolution ``y_i = sum_{j <= i} kernel_{i-j} x_j`` along the last axis, using a padded FFT."""
    length = x.shape[-1]
    if not x.numel():
        return x
    size = 2 * length
    return torch.fft.irfft(torch.fft.rfft(kernel, size) * torch.fft.rfft(x, size), size)[..., :length]
