"""S4D: a diagonal state space for each channel."""

from __future__ import annotations

import math

import torch
from torch import nn

from saccade.caches import RecurrentCache
from saccade.masks import Mask
from saccade.mechanisms.checked_mechanism import Approximate, Inputs
from saccade.mechanisms.features.mask_support import Visible, why_no_sum
from saccade.mechanisms.features.sequence_order import check_in_order
from saccade.mechanisms.state_spaces import Modes, StateSpaceMatrix
from saccade.support.errors import value_error
from saccade.support.language import Message
from saccade.support.numerics import widest_dtype
from saccade.support.validation import check_int, check_number


class S4D(Approximate):
    r"""A diagonal state space with the same parameters for every token, which is both a convolution and a recurrence.

    .. math:: x_t = e^{\Delta a} x_{t-1} + u_t, \qquad y_t = 2\,\mathrm{Re} \sum_n \bar{c}_n x_{tn} + d\,u_t, \qquad
              \bar{c} = c\, \frac{e^{\Delta a} - 1}{a}

    Weights depend only on distance. Queries and keys only determine the number of tokens, and each head is one channel.
    `saccade.nn.StateSpace` is the layer.

    Args:
        channels: number of channels, which are the heads of the matrix.
        state_dim: number of real numbers in a state; even.
        least_step, most_step: range of the channels' initial step sizes Δ.

    Attributes:
        log_step: log Δ, ``[channels]``.
        log_rate, frequency: ``a = -exp(log_rate) + i * frequency``, ``[channels, state_dim / 2]``; initialised as in
            S4D-Lin, to ``-1/2 + i π n``.
        weight: real and imaginary parts of c, ``[channels, state_dim / 2, 2]``.
        skip: d, ``[channels]``.

    Raises:
        ValueError: a size or a step is out of range.
        UnsupportedError: any mask except Causal or Causal within Documents, each alone or combined with masks that
            depend only on keys (Padding).

    Cost: O(n log n) for each channel, and O(state_dim) for a decoding step. FFTs mix up to 4,096 tokens at a time, so
    later values can change earlier outputs by rounding errors.

    Example:
        >>> from saccade.masks import Causal
        >>> u = torch.randn(1, 3, 5, 1)  # three channels
        >>> A = S4D(3, 8)(u, u, mask=Causal())
        >>> A.shape, torch.allclose(A[0, 0, 4, 3], A[0, 0, 2, 1])  # the same distance, the same weight
        ((1, 3, 5, 5), True)

    Reference: Gu et al. 2022, arXiv:2206.11893 (S4D); Gu et al. 2021, arXiv:2111.00396 (S4).
    """

    def __init__(self, channels: int, state_dim: int = 64, *, least_step: float = 1e-3, most_step: float = 0.1):
        super().__init__()
        self.channels = check_int("channels", channels)
        self.state_dim = check_int("state_dim", state_dim, 2)
        if state_dim % 2:
            raise value_error("state_dim", "be even: modes come in pairs", state_dim)
        check_number("least_step", least_step, above=0)
        if check_number("most_step", most_step, above=0) < least_step:
            raise value_error("most_step", f"be at least least_step {least_step}", most_step)
        self.least_step, self.most_step = least_step, most_step
        modes = state_dim // 2
        self.log_step = nn.Parameter(torch.empty(channels))
        self.log_rate = nn.Parameter(torch.empty(channels, modes))
        self.frequency = nn.Parameter(torch.empty(channels, modes))
        self.weight = nn.Parameter(torch.empty(channels, modes, 2))
        self.skip = nn.Parameter(torch.empty(channels))
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Draw new step sizes and weights, and reset the modes to the values of S4D-Lin."""
        with torch.no_grad():
            self.log_step.uniform_(math.log(self.least_step), math.log(self.most_step))
            self.log_rate.fill_(math.log(0.5))
            self.frequency.copy_(math.pi * torch.arange(self.frequency.shape[1]))
            self.weight.normal_(std=0.5**0.5)
            self.skip.normal_()

    def reasons(self, mask: Mask) -> tuple[str, ...]:
        if mask.is_causal:
            return why_no_sum(mask)
        words = "{mask} is not causal: a state contains only earlier tokens"
        return (*why_no_sum(mask), Message(words, mask=type(mask).__name__))

    def new_cache(self, max_len: int | None = None) -> RecurrentCache:
        """Return an empty `saccade.caches.RecurrentCache`, which stores the state in constant memory."""
        return RecurrentCache(max_len)

    def modes(self) -> Modes:
        """Return the modes of the state space, discretised to steps of one token."""
        wide = widest_dtype(self.weight.device)
        rate = torch.complex(-self.log_rate.to(wide).exp(), self.frequency.to(wide))
        turn = rate * self.log_step.to(wide).exp()[:, None]
        weight = torch.view_as_complex(self.weight.to(wide).contiguous())
        return Modes(turn, weight * (turn.exp() - 1.0) / rate, self.skip)

    def _matrix_of(self, inputs: Inputs) -> StateSpaceMatrix:
        if inputs.shape[1] != self.channels or inputs.key.shape[1] != self.channels:
            got = f"{inputs.shape[1]} and {inputs.key.shape[1]}"
            raise value_error("heads", f"be equal to the {self.channels} channels for queries and keys", got)
        visible = Visible.of(inputs)
        check_in_order(visible, *inputs.shape[2:])
        query = inputs.query
        return StateSpaceMatrix(
            self.modes(), inputs.shape, visible, dtype=query.dtype, device=query.device, source=("S4D", self.state_dim)
        )

    def extra_repr(self) -> str:
        return f"{self.channels}, {self.state_dim}"
