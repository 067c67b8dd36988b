"""Modes: the diagonal state space of each channel, in steps of one token, as a kernel and as a recurrence."""

from __future__ import annotations

import math
from typing import NamedTuple

import torch
from torch import Tensor

__all__ = ["Modes", "convolved"]

_BLOCK = 256  # tokens that reach a state in one product
_PIECE = 4096  # tokens that are convolved in one FFT; what came before reaches them through the state
_FEW = 8  # tokens, up to which steps cost less than products


class Modes(NamedTuple):
    r"""``x_t = a x_{t-1} + u_t``, ``y_t = 2 Re(c · x_t) + d u_t``, one of each for every channel.

    Attributes:
        log_factor: ``log a``, as wide as the device has it, complex ``[channels, modes]``: powers of large numbers of
            tokens turn far.
        weight: c, complex ``[channels, modes]``.
        skip: d, ``[channels]``.
    """

    log_factor: Tensor
    weight: Tensor
    skip: Tensor

    def kernel(self, length: int, dtype: torch.dtype) -> Tensor:
        """Return ``y`` for a single 1, ``[channels, length]``: powers of a are products of two from short lists."""
        if not length:
            return self.skip.new_zeros(len(self.skip), 0, dtype=dtype)
        width = max(1, math.isqrt(length - 1) + 1)
        near, far = self._powers(torch.arange(width)), self._powers(torch.arange(-(-length // width)) * width)
        wide = torch.complex128 if dtype == torch.float64 else torch.complex64
        rows = (far * self.weight).to(wide).movedim(0, 1) @ near.to(wide).movedim(0, 1).mT
        found = 2.0 * rows.real.flatten(1)[:, :length]
        return torch.cat([found[:, :1] + self.skip[:, None].to(dtype), found[:, 1:]], 1)

    def advance(self, value: Tensor, state: Tensor, powers: Tensor) -> tuple[Tensor, Tensor]:
        """Return the part of outputs that a state contributes, and the state after these tokens.

        Args:
            value: ``[batch, channels, len]``.
            state: complex ``[batch, channels, modes]``.
            powers: of a, from 0 to 256, or to the number of tokens, ``[channels, powers, modes]`` like the state.

        Returns:
            ``[batch, channels, len]``, and a state.
        """
        length, added = value.shape[2], []
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
                states.append(state)
                state = powers[:, count] * state + reached[:, :, i]
            decayed = torch.view_as_real(
                (powers[:, 1 : count + 1] * self.weight.to(state.dtype)[:, None]).conj_physical()
            )
            read = torch.view_as_real(torch.stack(states, 2)).flatten(3) @ decayed.flatten(2).mT
            added.append(2.0 * read.flatten(2))
        return (torch.cat(added, 2) if added else value), state

    def step(self, value: Tensor, state: Tensor) -> tuple[Tensor, Tensor]:
        """Return outputs and state, token by token; arguments as in `advance`."""
        factor, weight, out = self.log_factor.exp().to(state.dtype), self.weight.to(state.dtype), []
        for one in value.unbind(2):
            state = factor * state + one[..., None]
            out.append(2.0 * (weight * state).real.sum(-1) + self.skip.to(one.dtype) * one)
        return (torch.stack(out, 2) if out else value), state

    def run(self, value: Tensor, state: Tensor) -> tuple[Tensor, Tensor]:
        """Return outputs and state in the faster way: piece by piece, since FFTs that leave the cache cost more."""
        if value.shape[2] <= _FEW:
            return self.step(value, state)
        kernel, out = self.kernel(min(value.shape[2], _PIECE), value.dtype), []
        powers = self._powers(torch.arange(min(value.shape[2], _BLOCK) + 1)).to(state.dtype).movedim(0, 1)
        for part in value.split(_PIECE, 2):
            added, state = self.advance(part, state, powers)
            out.append(convolved(kernel[:, : part.shape[2]], part) + added)
        return torch.cat(out, 2), state

    def convolve(self, x: Tensor) -> Tensor:
        """Return the outputs alone, ``[batch, channels, len]``, without a state before them."""
        if x.shape[2] <= _PIECE:
            return convolved(self.kernel(x.shape[2], x.dtype), x)
        wide = torch.complex128 if x.dtype == torch.float64 else torch.complex64
        return self.run(x, torch.zeros(*x.shape[:2], self.weight.shape[1], dtype=wide, device=x.device))[0]

    def _powers(self, exponents: Tensor) -> Tensor:
        """Return the factors to each power, complex128 ``[powers, channels, modes]``."""
        place = exponents.to(self.log_factor.device, torch.float64)
        return (self.log_factor * place[:, None, None]).exp()


def convolved(kernel: Tensor, x: Tensor) -> Tensor:
    """Return ``y_i = sum_{j <= i} kernel_{i-j} x_j`` along the last axis, by FFT, padded against wrap-around."""
    length = x.shape[-1]
    if not x.numel():
        return x
    size = 2 * length
    return torch.fft.irfft(torch.fft.rfft(kernel, size) * torch.fft.rfft(x, size), size)[..., :length]
