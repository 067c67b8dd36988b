"""Rotary scaling: adapt frequencies to sequences longer than in training (linear, NTK, Llama 3, YaRN)."""

from __future__ import annotations

import dataclasses
import math
from abc import ABC, abstractmethod

import torch
from torch import Tensor

from saccade.support.validation import check_bool, check_int, check_number

Device = torch.device | None


def plain_frequencies(base: float, rotary_dim: int, dtype: torch.dtype, device: Device = None) -> Tensor:
    """Return the unscaled rotary frequencies ``base ** (-2 i / rotary_dim)``, a tensor ``[rotary_dim // 2]``."""
    return 1.0 / base ** (torch.arange(0, rotary_dim, 2, dtype=dtype, device=device) / rotary_dim)


class Scaling(ABC):
    """Base class of rotary scalings, which change frequencies for sequences longer than in training.

    A scaling is immutable and does not depend on the length of a call. Keys in a cache are already rotated, so
    frequencies that change with the length would rotate a prefill and its decoding steps differently.
    """

    @property
    def magnitude(self) -> float:
        """Factor that multiplies rotated queries and keys."""
        return 1.0

    @abstractmethod
    def frequencies(self, base: float, rotary_dim: int, dtype: torch.dtype, device: Device = None) -> Tensor:
        """Return the scaled frequency of each pair of channels in radians per position, ``[rotary_dim // 2]``."""

    def reasons(self, base: float, rotary_dim: int) -> tuple[str, ...]:
        """Return the reasons why the rotary scaling does not support the given sizes; an empty tuple if it does."""
        return ()


@dataclasses.dataclass(frozen=True)
class Linear(Scaling):
    """Rotary scaling by interpolation: all frequencies are divided by ``factor``.

    Args:
        factor: ratio of the new length to the trained length, at least 1.

    Raises:
        ValueError: ``factor`` is not a finite number of at least 1.

    Example:
        >>> Linear(4.0).frequencies(10000.0, 4, torch.float32).tolist()
        [0.25, 0.0024999999441206455]

    Reference: Chen et al. 2023, arXiv:2306.15595, section 2.3.
    """

    factor: float

    def __post_init__(self) -> None:
        check_number("factor", self.factor, least=1)

    def frequencies(self, base: float, rotary_dim: int, dtype: torch.dtype, device: Device = None) -> Tensor:
        return plain_frequencies(base, rotary_dim, dtype, device) / float(self.factor)  # an int may exceed 64 bits


@dataclasses.dataclass(frozen=True)
class NTK(Scaling):
    r"""Rotary scaling by a larger base: the lowest frequency is divided by ``factor``, the highest is unchanged.

    .. math:: \mathrm{base}' = \mathrm{base} \cdot \mathrm{factor}^{D / (D - 2)}

    The dynamic form, where the base grows with the length, is not available: keys in a cache were rotated with an
    earlier base, so decoding would no longer match the full run. For models trained that way, choose one length:
    `NTK.at_length` matches ``"dynamic"`` in transformers for a sequence of that length that is processed in one run.

    Args:
        factor: divisor of the lowest frequency, at least 1.

    Raises:
        ValueError: ``factor`` is not a finite number of at least 1; on use, there are fewer than four channels.

    Example:
        >>> NTK.at_length(2.0, length=8192, trained_len=4096)
        NTK(factor=3.0)

    Reference: Peng et al. 2023, arXiv:2309.00071, section 3.1; first published online as "NTK-aware" scaling.
    """

    factor: float

    def __post_init__(self) -> None:
        check_number("factor", self.factor, least=1)

    @classmethod
    def at_length(cls, factor: float, length: int, trained_len: int) -> NTK:
        """Return the dynamic NTK scaling for one length: factor ``factor * length / trained_len - (factor - 1)``.

        Args:
            factor: factor of the dynamic form, at least 1.
            length: length of the longest sequence to process; up to ``trained_len``, frequencies are unscaled.
            trained_len: length of the longest sequence in training.
        """
        check_number("factor", factor, least=1)
        check_int("length", length)
        check_int("trained_len", trained_len)
        return cls(factor * max(length, trained_len) / trained_len - (factor - 1))

    def frequencies(self, base: float, rotary_dim: int, dtype: torch.dtype, device: Device = None) -> Tensor:
        larger = base * self.factor ** (rotary_dim / (rotary_dim - 2))
        return plain_frequencies(larger, rotary_dim, dtype, device)

    def reasons(self, base: float, rotary_dim: int) -> tuple[str, ...]:
        return ("NTK needs at least 4 rotated channels",) if rotary_dim < 4 else ()


@dataclasses.dataclass(frozen=True)
class Llama3(Scaling):
    """Rotary scaling of Llama 3: interpolate long waves and leave short ones unchanged, with a smooth transition.

    A wave is long if fewer than ``low_freq_factor`` of its periods fit into the trained length, and short if more than
    ``high_freq_factor`` do.

    Args:
        factor: divisor of the frequencies of long waves, at least 1; 8 in Llama 3.1.
        low_freq_factor: number of periods in the trained length below which a wave is long; 1 in Llama 3.1.
        high_freq_factor: number of periods above which a wave is short; 4 in Llama 3.1.
        trained_len: length of the longest sequence in training; 8192 in Llama 3.1.

    Raises:
        ValueError: a number is out of range, or the two limits are not in order.

    Example:
        >>> Llama3(8.0, 1.0, 4.0, 8192).frequencies(500000.0, 4, torch.float32).tolist()
        [1.0, 0.0005248460220173001]

    Reference: Grattafiori et al. 2024, arXiv:2407.21783; the formula is from the published code.
    """

    factor: float
    low_freq_factor: float
    high_freq_factor: float
    trained_len: int

    def __post_init__(self) -> None:
        check_number("factor", self.factor, least=1)
        check_number("low_freq_factor", self.low_freq_factor, above=0)
        check_number("high_freq_factor", self.high_freq_factor, above=self.low_freq_factor)
        check_int("trained_len", self.trained_len)

    def frequencies(self, base: float, rotary_dim: int, dtype: torch.dtype, device: Device = None) -> Tensor:
        plain = plain_frequencies(base, rotary_dim, dtype, device)
        low, high = float(self.low_freq_factor), float(self.high_freq_factor)
        periods = float(self.trained_len) / (2 * math.pi / plain)
        unscaled_share = (periods - low) / (high - low)
        unscaled_share = unscaled_share.clamp(0.0, 1.0)
        return (1 - unscaled_share) * plain / float(self.factor) + unscaled_share * plain


@dataclasses.dataclass(frozen=True)
class YaRN(Scaling):
    """Rotary scaling by YaRN: interpolate long waves, leave short ones unchanged, and sharpen the scores.

    Pairs that rotate more than ``beta_fast`` times within the trained length are unchanged, and pairs that rotate fewer
    than ``beta_slow`` times are interpolated. In between, a linear ramp over the index of the pair blends the two.

    Args:
        factor: ratio of the new length to the trained length, at least 1.
        trained_len: length of the longest sequence in training.
        beta_fast: number of rotations above which a pair is unchanged.
        beta_slow: number of rotations below which a pair is interpolated.
        attention_factor: factor that multiplies rotated queries and keys, so that scores grow by its square;
            ``0.1 * ln(factor) + 1`` when None. Models with an ``mscale`` in their configuration need a different value.
        truncate: whether to round the ends of the ramp outwards to integers, as published; False for gpt-oss.

    Raises:
        ValueError: a number is out of range, or the two limits are not in order.

    Example:
        >>> round(YaRN(4.0, 4096).magnitude, 4)
        1.1386

    Reference: Peng et al. 2023, arXiv:2309.00071, section 3; the ramp is from the published code.
    """

    factor: float
    trained_len: int
    beta_fast: float = 32.0
    beta_slow: float = 1.0
    attention_factor: float | None = None
    truncate: bool = True

    def __post_init__(self) -> None:
        check_number("factor", self.factor, least=1)
        check_int("trained_len", self.trained_len)
        check_number("beta_slow", self.beta_slow, above=0)
        check_number("beta_fast", self.beta_fast, above=self.beta_slow)
        if self.attention_factor is not None:
            check_number("attention_factor", self.attention_factor, above=0)
        check_bool("truncate", self.truncate)

    @property
    def magnitude(self) -> float:
        return 0.1 * math.log(self.factor) + 1.0 if self.attention_factor is None else float(self.attention_factor)

    def frequencies(self, base: float, rotary_dim: int, dtype: torch.dtype, device: Device = None) -> Tensor:
        plain = plain_frequencies(base, rotary_dim, dtype, device)
        first, last = (self._pair_with_turns(turns, base, rotary_dim) for turns in (self.beta_fast, self.beta_slow))
        if self.truncate:
            first, last = math.floor(first), math.ceil(last)
        first, last = max(first, 0), min(last, rotary_dim - 1)
        last = last if last > first else first + 0.001  # an abrupt transition if no pair is in between
        pair = torch.arange(rotary_dim // 2, dtype=dtype, device=device)
        interpolated = ((pair - first) / (last - first)).clamp(0.0, 1.0)
        return plain / float(self.factor) * interpolated + plain * (1 - interpolated)

    def _pair_with_turns(self, turns: float, base: float, rotary_dim: int) -> float:
        """Return the fractional index of the channel pair that rotates ``turns`` times in the trained length."""
        return rotary_dim * math.log(self.trained_len / (turns * 2 * math.pi)) / (2 * math.log(base))
