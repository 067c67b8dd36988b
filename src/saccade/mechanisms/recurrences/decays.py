"""Decays between the tokens of a chunk of a recurrence, computed so that exponentials do not overflow."""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

import torch
from torch import Tensor

from saccade.mechanisms.fake_tensors import is_readable

_STEPS = 8  # number of tokens whose decays are computed pair by pair if each channel has its own decay
_SAFE = -60.0  # exp(60), times queries, keys and gradients, is finite in float32


class _Step(NamedTuple):
    """A few adjacent rows of a chunk, with the decays between them and from all earlier tokens of the chunk."""

    rows: slice
    before: slice
    from_first: Tensor
    to_first: Tensor
    among: Tensor


class Decays(NamedTuple):
    """The decays between the tokens of several chunks, computed from log decays summed within each chunk.

    Attributes:
        sums: float64 ``[chunks, sequences, CHUNK, 1 | head_dim]``, because float32 would lose small differences
            between large sums. None for no decay.
        allowed: bool ``[..., CHUNK, CHUNK]``, True for each token paired with itself or an earlier token.
        table: the share that remains for each allowed pair, ``[chunks, sequences, CHUNK, CHUNK]``; None unless all
            channels share one decay.
        from_start, to_end: the share of the incoming state that remains at each token, and the share of each token that
            remains at the end of the chunk. None without decay.
    """

    sums: Tensor | None
    allowed: Tensor
    table: Tensor | None
    from_start: Tensor | None
    to_end: Tensor | None

    @classmethod
    def of(cls, decay: Tensor | None, allowed: Tensor, dtype: torch.dtype) -> Decays:
        """Compute the decays within chunks from log decays, float64 ``[chunks, sequences, CHUNK, 1 | head_dim]``."""
        if decay is None:
            return cls(None, allowed, None, None, None)
        sums, table = decay.cumsum(2), None
        if sums.shape[3] == 1:
            table = (sums - sums.mT).to(dtype).masked_fill_(~allowed, -torch.inf).exp_()
        return cls(sums, allowed, table, sums.exp().to(dtype), (sums[:, :, -1:] - sums).exp_().to(dtype))

    def kept(self, like: Tensor) -> Tensor:
        """Return the share of the state that remains after a full chunk, ``[chunks, sequences, 1 | head_dim, 1]``."""
        if self.from_start is None:
            return like.new_ones(len(like), 1, 1, 1)
        return self.from_start[:, :, -1, :, None]

    def products(self, a: Tensor, k: Tensor) -> Tensor:
        """Return decayed dot products ``sum_c a_ic k_jc exp(sums_ic - sums_jc)``, or 0 for pairs that are not allowed.

        Args:
            a: ``[chunks, sequences, CHUNK, head_dim]``; several of these may be stacked along the third axis if all
                channels share one decay.
            k: ``[chunks, sequences, CHUNK, head_dim]``.
        """
        if self.sums is None:
            return self._hidden((a @ k.mT).unflatten(2, (-1, k.shape[2]))).flatten(2, 3)
        if self.table is not None:
            return ((a @ k.mT).unflatten(2, (-1, k.shape[2])) * self.table[:, :, None]).flatten(2, 3)
        if self._is_mild:
            assert self.from_start is not None
            return self._hidden(((a * self.from_start) @ (k / self.from_start).mT)[:, :, None])[:, :, 0]
        out = a.new_zeros(*a.shape[:-1], k.shape[-2])
        for step in self._steps(a.dtype):
            part = a[:, :, step.rows]
            if step.before.stop:
                out[:, :, step.rows, step.before] = (part * step.from_first) @ (k[:, :, step.before] * step.to_first).mT
            out[:, :, step.rows, step.rows] = (part[:, :, :, None] * step.among * k[:, :, None, step.rows]).sum(-1)
        return self._hidden(out[:, :, None])[:, :, 0]

    def gradients(self, grad: Tensor, a: Tensor, k: Tensor) -> tuple[Tensor, Tensor]:
        """Return da and dk, the gradients of `products` with respect to ``a`` and ``k``.

        The gradient with respect to the summed log decays is ``a * da`` for rows and ``-k * dk`` for keys. Several
        tensors may be stacked as ``a``.
        """
        high, several = k.shape[2], grad.unflatten(2, (-1, k.shape[2]))
        if self.table is not None:
            grad = (several * self.table[:, :, None]).flatten(2, 3)
            return grad @ k, grad.mT @ a
        grad = self._hidden(several).flatten(2, 3)
        if self.sums is None:
            return grad @ k, grad.mT @ a
        if grad.shape[2] > high:
            pairs = [self.gradients(x, y, k) for x, y in zip(grad.split(high, 2), a.split(high, 2), strict=True)]
            return torch.cat([da for da, _ in pairs], 2), sum((dk for _, dk in pairs), torch.zeros_like(k))
        if self._is_mild:
            grown = self.from_start
            assert grown is not None
            return (grad @ (k / grown)) * grown, (grad.mT @ (a * grown)) / grown
        da, dk = torch.zeros_like(a), torch.zeros_like(k)
        for step in self._steps(a.dtype):
            rows, before = step.rows, step.before
            if before.stop:
                part = grad[:, :, rows, before]
                da[:, :, rows] += step.from_first * (part @ (k[:, :, before] * step.to_first))
                dk[:, :, before] += step.to_first * (part.mT @ (a[:, :, rows] * step.from_first))
            diagonal = step.among * grad[:, :, rows, rows, None]
            da[:, :, rows] += (diagonal * k[:, :, None, rows]).sum(-2)
            dk[:, :, rows] += (diagonal * a[:, :, rows, None]).sum(-3)
        return da, dk

    @property
    def _is_mild(self) -> bool:
        """Whether decays are weak enough to compute as quotients of exponentials; False if values are unreadable."""
        sums = self.sums
        return sums is not None and is_readable(sums) and sums.numel() > 0 and bool(sums.amin() > _SAFE)

    def _hidden(self, pairs: Tensor) -> Tensor:
        """Set decayed products ``[chunks, sequences, several, CHUNK, CHUNK]`` to 0 for pairs that are not allowed."""
        allowed = self.allowed if self.allowed.dim() == 2 else self.allowed[:, :, None]
        return pairs.masked_fill(~allowed, 0.0)

    def _steps(self, dtype: torch.dtype) -> Iterator[_Step]:
        assert self.sums is not None
        for start in range(0, self.sums.shape[2], _STEPS):
            rows, before = slice(start, start + _STEPS), slice(0, start)
            sums, first = self.sums[:, :, rows], self.sums[:, :, start : start + 1]
            among = (sums[:, :, :, None] - sums[:, :, None]).to(dtype).clamp_(max=0.0).exp_()
            to_first = (first - self.sums[:, :, before]).to(dtype).exp_()
            yield _Step(rows, before, (sums - first).to(dtype).exp_(), to_first, among)
