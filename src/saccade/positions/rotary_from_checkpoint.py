"""Rotary embeddings from checkpoints: stored frequencies, or stored tables of cosines and sines."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any, Literal, Self

import torch
from torch import Tensor

from saccade.positions.rotary import Rotary, paired, rotated
from saccade.positions.rotary_scaling import Device, Scaling
from saccade.positions.token_positions import as_positions, check_below
from saccade.support.errors import type_error, value_error
from saccade.support.numerics import wide_dtype
from saccade.support.validation import ShapeSpec, check_number, is_finite_number, register_tensor

_GIVEN = ShapeSpec("cos [positions, pairs]", "sin [positions, pairs]")


@dataclasses.dataclass(frozen=True, repr=False)
class Frequencies(Scaling):
    """A rotary scaling with explicit frequencies, such as ``inv_freq`` from a checkpoint; the base has no effect.

    Args:
        radians: angle per position for each channel pair: ``rotary_dim // 2`` numbers, in a sequence or a tensor.
        attention_factor: factor that multiplies rotated queries and keys.

    Raises:
        TypeError, ValueError: an argument does not consist of finite numbers.
        UnsupportedError: on use, the number of frequencies differs from the number of channel pairs.

    Example:
        >>> from saccade.positions import Rotary
        >>> Rotary(4, scaling=Frequencies([1.0, 0.25]))
        Rotary(4, base=10000, rotary_dim=4, layout='half', scaling=Frequencies(2 pairs, from 1 to 0.25))
    """

    radians: Sequence[float] | Tensor
    attention_factor: float = 1.0

    def __post_init__(self) -> None:
        radians: Any = self.radians
        if isinstance(radians, Tensor):
            if radians.dim() != 1:
                raise value_error("radians", "have shape [pairs]", list(radians.shape))
            if radians.requires_grad:
                hint = "pass radians.detach(); RotaryTables(cos, sin) has gradients"
                raise value_error("radians", "not require a gradient", "a tensor that does", hint=hint)
            radians = radians.double().tolist()
        if isinstance(radians, str) or not isinstance(radians, Sequence) or not all(map(is_finite_number, radians)):
            raise type_error("radians", "be finite numbers, one for each pair", type(radians).__name__)
        object.__setattr__(self, "radians", tuple(map(float, radians)))
        check_number("attention_factor", self.attention_factor, above=0)

    @property
    def magnitude(self) -> float:
        return float(self.attention_factor)

    def frequencies(self, base: float, rotary_dim: int, dtype: torch.dtype, device: Device = None) -> Tensor:
        return torch.tensor(self.radians, dtype=dtype, device=device)

    def reasons(self, base: float, rotary_dim: int) -> tuple[str, ...]:
        if 2 * len(self.radians) == rotary_dim:
            return ()
        return (f"there are {len(self.radians)} frequencies, but {rotary_dim} channels have {rotary_dim // 2} pairs",)

    def __repr__(self) -> str:
        interval = f", from {self.radians[0]:g} to {self.radians[-1]:g}" if len(self.radians) else ""
        times = "" if self.attention_factor == 1.0 else f", attention_factor={self.attention_factor:g}"
        return f"Frequencies({len(self.radians)} pairs{interval}{times})"


class RotaryTables(Rotary):
    """Rotary embeddings that use stored tables, such as ``cos_cache`` and ``sin_cache`` of an ONNX model.

    The tables have one value per position and channel pair. Tables from transformers contain each value twice, so pass
    ``cos[:, : cos.shape[1] // 2]``. The tables stay float32 (or float64 if passed as such) when the module is converted
    to a different dtype, and are part of its state dict.

    Args:
        cos, sin: ``[positions, rotary_dim // 2]``.
        head_dim: width of queries and keys of one head; the rotated width when None.
        layout: see `Rotary`.

    Raises:
        ValueError: the tables have different shapes; on use, a position is beyond the end of the tables.
        TypeError: the tables are not floating-point tensors.

    Example:
        >>> plain = Rotary(8)
        >>> read = RotaryTables(*plain.tables(range(10)))
        >>> x = torch.randn(1, 2, 10, 8)
        >>> torch.equal(read(x, range(10)), plain(x, range(10)))
        True
    """

    cos: Tensor
    sin: Tensor

    def __init__(
        self,
        cos: Tensor,
        sin: Tensor,
        *,
        head_dim: int | None = None,
        layout: Literal["half", "interleaved"] = "half",
    ):
        pairs = _GIVEN.check(cos, sin)["pairs"]
        for name, x in (("cos", cos), ("sin", sin)):
            if not x.is_floating_point():
                got = str(x.dtype).removeprefix("torch.")
                raise type_error(name, "be a float tensor", got)
        super().__init__(2 * pairs if head_dim is None else head_dim, rotary_dim=2 * pairs, layout=layout)
        for name, x in (("cos", cos), ("sin", sin)):
            register_tensor(self, name, x, wide_dtype(x.dtype))

    def unrotate(self, x: Tensor, positions: range | Tensor) -> Tensor:
        cos, sin = self._cos_and_sin(x, positions)
        square = cos.square() + sin.square()
        return rotated(x, cos / square, -sin / square, self.layout)

    def extra_repr(self) -> str:
        return f"{len(self.cos)} positions, {self.head_dim}, rotary_dim={self.rotary_dim}, layout={self.layout!r}"

    def _factors_at(self, positions: range | Tensor, like: Tensor) -> tuple[Tensor, Tensor]:
        place = torch.atleast_2d(as_positions(positions, like.device)).clamp(min=0)
        if place.numel():
            check_below(place, len(self.cos), "pass tables with more positions")
        dtype = wide_dtype(like.dtype)
        cos, sin = (x.to(like.device, dtype)[place][:, None] for x in (self.cos, self.sin))
        return paired(cos, sin, self.layout)

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> Self:
        before = {name: x for name, x in self._buffers.items() if x is not None}
        super()._apply(fn, recurse)
        for name, x in before.items():
            moved = self._buffers[name]
            if moved is not None and moved.dtype != x.dtype:  # rounding would give distant tokens wrong angles
                self._buffers[name] = x.to(moved.device)
        return self
