"""Rotary: rotate queries and keys by their positions."""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache
from types import NoneType
from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor, nn

from saccade.positions.rotary_scaling import Scaling, plain_frequencies
from saccade.positions.token_positions import as_positions
from saccade.support.argument_hints import ArgumentHints
from saccade.support.autograd_functions import is_eager_training, needs_plain_backward
from saccade.support.errors import describe, shown, type_error, unsupported, value_error
from saccade.support.numerics import wide_dtype
from saccade.support.torch_modes import is_plain
from saccade.support.validation import check_bool, check_choice, check_int, check_number, check_type

_MOST_CACHED = 1 << 13  # maximum number of positions with cached angles: 8 MB for heads of width 128
_Axes = tuple[int, ...]
# All attributes that determine the angles.
_RotationSettings = tuple[float, int, str, Scaling | None, _Axes | None, torch.dtype, torch.device]
_BLOCK = 64  # for a single position, angles are computed for the aligned block of this many positions around it


class Tables(NamedTuple):
    """The cosines and sines of rotary angles, each ``[len, pairs]`` or ``[batch, len, pairs]``."""

    cos: Tensor
    sin: Tensor


class Rotary(ArgumentHints, nn.Module):
    r"""Rotary embeddings: rotate queries and keys by position, so that their product depends only on the distance.

    Channels form pairs, and pair i of a token at position p is rotated by the angle :math:`p\,\theta_i`:

    .. math:: \begin{pmatrix} x' \\ y' \end{pmatrix} = \begin{pmatrix} \cos p\theta_i & -\sin p\theta_i \\
              \sin p\theta_i & \cos p\theta_i \end{pmatrix} \begin{pmatrix} x \\ y \end{pmatrix}, \qquad
              \theta_i = \mathrm{base}^{-2i / D}

    The rotation preserves lengths, and the product of a query at m and a key at n depends only on m - n. Rotate both
    queries and keys, after their projection and before a cache, but never values.

    There are no parameters or buffers. Angles are computed in float32 (float64 for float64 input), never in half
    precision, regardless of the dtype of the module and of autocast.

    Args:
        head_dim: width of queries and keys of one head.
        base: base of the frequencies.
        rotary_dim: number of leading channels that are rotated; the other channels stay unchanged. ``head_dim`` when
            None.
        layout: which channels form a pair: ``"half"`` pairs channel i of the first half with channel i of the second
            (GPT-NeoX, Llama), ``"interleaved"`` pairs neighbours (the paper, GPT-J). Weights trained with one layout do
            not work with the other.
        scaling: how to change the frequencies for sequences longer than in training; unscaled when None.
        sections: for positions with several axes, such as (time, height, width), the number of channel pairs that each
            axis rotates; they must sum to half of ``rotary_dim``. None for positions with a single axis. Text has equal
            positions on all axes, so passing positions without axes gives the same rotation as without sections.
        interleaved_sections: whether successive pairs cycle through the axes (Qwen3-VL) instead of forming one section
            per axis (Qwen2-VL). The first axis rotates the leftover pairs.

    Raises:
        ValueError: the sizes are inconsistent; on use, a shape is wrong or a position is below -1.
        TypeError: the scaling, x or the positions have the wrong type.
        UnsupportedError: the scaling does not support the sizes.

    Cost: O(len * head_dim) for each head. Angles are computed once for all heads and, if the positions are a range,
        once for all layers.

    Example:
        >>> rotary = Rotary(2, layout="interleaved")
        >>> key = torch.tensor([1.0, 0.0]).expand(1, 1, 3, 2)
        >>> rotary(key, range(3))[0, 0]
        tensor([[ 1.0000,  0.0000],
                [ 0.5403,  0.8415],
                [-0.4161,  0.9093]])

    Reference: Su et al. 2021, arXiv:2104.09864, section 3.2; partial rotation: Black et al. 2022, arXiv:2204.06745;
    sections: Wang et al. 2024, arXiv:2409.12191, section 2.1.
    """

    def __init__(
        self,
        head_dim: int,
        *,
        base: float = 10000.0,
        rotary_dim: int | None = None,
        layout: Literal["half", "interleaved"] = "half",
        scaling: Scaling | None = None,
        sections: Sequence[int] | None = None,
        interleaved_sections: bool = False,
    ):
        super().__init__()
        self.head_dim = check_int("head_dim", head_dim)
        self.rotary_dim = rotary_dim = check_int("rotary_dim", head_dim if rotary_dim is None else rotary_dim)
        self.base = check_number("base", base, above=1)
        self.layout = check_choice("layout", layout, ("half", "interleaved"))
        hint = "for instance saccade.positions.YaRN(4.0, trained_len=4096)"
        self.scaling = check_type("scaling", scaling, (Scaling, NoneType), "be a scaling, or None", hint=hint)
        if rotary_dim % 2:
            raise value_error("rotary_dim", "be even", rotary_dim, hint="channels are rotated in pairs")
        if rotary_dim > head_dim:
            raise value_error("rotary_dim", f"be at most head_dim {head_dim}", rotary_dim)
        self.sections = None if sections is None else tuple(check_int("sections", size, 0) for size in sections)
        self.interleaved_sections = check_bool("interleaved_sections", interleaved_sections)
        self._axes = None if self.sections is None else _axis_of_pairs(self.sections, interleaved_sections, rotary_dim)
        reasons = () if scaling is None else scaling.reasons(base, rotary_dim)
        if reasons:
            raise unsupported(type(scaling).__name__, reasons)

    def forward(self, x: Tensor, positions: range | Tensor) -> Tensor:
        """Rotate queries or keys by their positions.

        Args:
            x: queries or keys, ``[batch, heads, len, head_dim]``.
            positions: a range, or int64 ``[len]`` or ``[batch, len]``; with ``sections`` also ``[batch | 1, axes,
                len]``. -1 (no token) is treated as 0.

        Returns:
            The rotated tensor, with the shape and dtype of x.
        """
        return rotated(x, *self._cos_and_sin(x, positions), self.layout)

    def unrotate(self, x: Tensor, positions: range | Tensor) -> Tensor:
        """Undo the rotation of `forward`, up to a rounding error in the dtype of x.

        To move a key to a new position, undo the rotation and rotate again. Always start from the stored key, because
        repeated moves in half precision would accumulate rounding errors.

        Args:
            x: a result of `forward`, ``[batch, heads, len, head_dim]``.
            positions: the positions passed to `forward`.

        Returns:
            The tensor before rotation, with the shape and dtype of x.
        """
        cos, sin = self._cos_and_sin(x, positions)
        square = 1.0 if self.scaling is None else self.scaling.magnitude**2
        return rotated(x, cos if square == 1.0 else cos / square, sin / -square, self.layout)

    def tables(
        self, positions: range | Tensor, *, dtype: torch.dtype = torch.float32, device: torch.device | None = None
    ) -> Tables:
        """Return the cosines and sines of the rotary angles, times the magnitude of the scaling.

        Args:
            positions: as in `forward`.
            dtype: float32 or float64, for the computation of the angles.
            device: device of the tables; the device of the positions when None.

        Returns:
            ``(cos, sin)``, each ``[len, rotary_dim // 2]``, or ``[batch, len, rotary_dim // 2]``.
        """
        check_choice("dtype", dtype, (torch.float32, torch.float64))
        place = as_positions(positions, device)
        cos, sin = (x[:, 0] for x in self._factors_at(place, torch.empty(0, dtype=dtype, device=place.device)))
        pairs, step = self.rotary_dim // 2, 2 if self.layout == "interleaved" else 1
        # The second channel of each pair adds its partner, while the first subtracts it.
        cos, sin = (x[..., pairs:] if step == 1 else x[..., 1::2] for x in (cos, sin))
        return Tables(cos[0], sin[0]) if place.dim() == 1 else Tables(cos, sin)

    def extra_repr(self) -> str:
        return (
            f"{self.head_dim}, base={self.base:g}, rotary_dim={self.rotary_dim}, layout={self.layout!r}, "
            f"scaling={self.scaling}" + ("" if self.sections is None else f", sections={self.sections}")
        )

    def _cos_and_sin(self, x: Tensor, positions: range | Tensor) -> tuple[Tensor, Tensor]:
        """Check x and the positions, and return the rotary factors as `_factors` does."""
        if not isinstance(x, Tensor) or not x.is_floating_point():
            got = str(getattr(x, "dtype", type(x).__name__)).removeprefix("torch.")
            raise type_error("x", "be a float tensor", got)
        if x.dim() != 4 or x.shape[3] != self.head_dim:
            raise value_error("x", f"have shape [batch, heads, len, {self.head_dim}]", list(x.shape))
        batch, _, length, _ = x.shape
        shape = (len(positions),) if isinstance(positions, range) else getattr(positions, "shape", None)
        allowed: list[tuple[int, ...]] = [(length,), (1, length), (batch, length)]
        axes = 0 if self.sections is None else len(self.sections)
        if axes:
            allowed += [(1, axes, length), (batch, axes, length)]
        if shape is not None and tuple(shape) not in allowed:
            rule = f"have shape [{length}] or [{batch}, {length}]"  # formatting a symbolic length fixes it
            rule += f", or [{batch}, {axes}, {length}] with an axis for each section" if axes else ""
            raise value_error("positions", rule, list(shape), facts=[describe("x", x)])
        return self._factors_at(positions, x)

    def _factors_at(self, positions: range | Tensor, like: Tensor) -> tuple[Tensor, Tensor]:
        """Return the rotary factors for validated positions, on the device and in the widened dtype of ``like``."""
        settings = (
            self.base,
            self.rotary_dim,
            self.layout,
            self.scaling,
            self._axes,
            wide_dtype(like.dtype),
            like.device,
        )
        if isinstance(positions, range) and is_plain(like):
            # Tensors created in inference mode must not be used with autograd.
            inference, length = torch.is_inference_mode_enabled(), len(positions)
            if length == 1 and positions.start >= 0:
                return _cached_factors_of_one(positions.start, settings, inference)
            if length <= _MOST_CACHED:
                return _cached_factors(positions, settings, inference)
        return _factors(positions, settings)


def _factors(positions: range | Tensor, settings: _RotationSettings) -> tuple[Tensor, Tensor]:
    """Compute two rotary factors per channel, each ``[batch | 1, 1, len, rotary_dim]``.

    A rotated channel is the first factor times the channel plus the second factor times its partner.
    """
    base, rotary_dim, layout, scaling, axes, dtype, device = settings
    make = plain_frequencies if scaling is None else scaling.frequencies
    place = torch.atleast_2d(as_positions(positions, device)).clamp(min=0).to(dtype)
    # The position of each channel pair on its axis: [batch | 1, len, pairs].
    by_pair = place[..., None] if place.dim() == 2 else place[:, list(axes or ())].mT
    angles = by_pair[:, None] * make(base, rotary_dim, dtype, device)
    magnitude = 1.0 if scaling is None else scaling.magnitude
    cos, sin = (x if magnitude == 1.0 else x * magnitude for x in (angles.cos(), angles.sin()))
    return paired(cos, sin, layout)


def _axis_of_pairs(sections: tuple[int, ...], interleaved: bool, rotary_dim: int) -> _Axes:
    """Return, for each pair of channels, the index of the position axis that rotates it."""
    pairs, axes = rotary_dim // 2, len(sections)
    if sum(sections) != pairs or not sections:
        raise value_error("sections", f"sum to {pairs}, half of rotary_dim", shown(sections))
    if not interleaved:
        return tuple(axis for axis, size in enumerate(sections) for _ in range(size))
    turns = [pair % axes if pair < sections[pair % axes] * axes else 0 for pair in range(pairs)]
    if [turns.count(axis) for axis in range(axes)] != list(sections):
        hint = "the first axis takes the remaining pairs, so its section must be the largest"
        raise value_error("sections", "allow the pairs to cycle through the axes", shown(sections), hint=hint)
    return tuple(turns)


def rotated(x: Tensor, cos: Tensor, sin: Tensor, layout: str) -> Tensor:
    """Rotate the first channels of queries or keys by the factors from `paired`; all other channels are unchanged."""
    if torch.is_grad_enabled() and is_eager_training(x, cos, sin) and not (cos.requires_grad or sin.requires_grad):
        out: Tensor = _Rotation.apply(x, cos, sin, layout, 1)
        return out
    rotary_dim = cos.shape[-1]
    part = x if rotary_dim == x.shape[-1] else x[..., :rotary_dim]
    wide = part if part.dtype == cos.dtype else part.to(cos.dtype)  # each operation costs time
    if layout == "half":
        other = wide.roll(rotary_dim // 2, -1)
    else:  # batched gradients support reshape, but not flatten
        other = wide.reshape(*wide.shape[:-1], rotary_dim // 2, 2).flip(-1).reshape(wide.shape)
    turned = torch.addcmul(wide * cos, other, sin)
    turned = turned if wide is part else turned.to(x.dtype)
    return turned if part is x else torch.cat([turned, x[..., rotary_dim:]], -1)


class _Rotation(torch.autograd.Function):
    """Autograd function of the rotation, whose gradient is rotated back. It stores nothing but the factors."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, cos: Tensor, sin: Tensor, layout: str, sign: int) -> Tensor:
        out = torch.empty_like(x)
        ctx.save_for_backward(cos, sin)
        ctx.layout, ctx.sign, ctx.strides = layout, sign, out.stride()
        return _turn(x, cos, sin, layout, sign, out)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        cos, sin = ctx.saved_tensors
        if needs_plain_backward(grad):
            return rotated(grad, cos, sin * -ctx.sign, ctx.layout), None, None, None, None
        out = torch.empty_strided(grad.shape, ctx.strides, dtype=grad.dtype, device=grad.device)
        return _turn(grad, cos, sin, ctx.layout, -ctx.sign, out), None, None, None, None


def _turn(x: Tensor, cos: Tensor, sin: Tensor, layout: str, sign: int, out: Tensor) -> Tensor:
    """Write the channels of x, the first of them rotated forward (sign 1) or back (-1), into ``out``."""
    rotary_dim = cos.shape[-1]
    torch.mul(x[..., :rotary_dim], cos, out=out[..., :rotary_dim])
    if rotary_dim < x.shape[-1]:
        out[..., rotary_dim:] = x[..., rotary_dim:]
    pairs = rotary_dim // 2
    first, second = (
        (slice(0, pairs), slice(pairs, rotary_dim))
        if layout == "half"
        else (slice(0, rotary_dim, 2), slice(1, rotary_dim, 2))
    )
    for own, other in ((first, second), (second, first)):
        out[..., own].addcmul_(x[..., other], sin[..., own], value=sign)
    return out


def paired(cos: Tensor, sin: Tensor, layout: str) -> tuple[Tensor, Tensor]:
    """Expand the cosines and sines of channel pairs to the two rotary factors of each channel; see `_factors`."""
    if layout == "half":
        return torch.cat([cos, cos], -1), torch.cat([-sin, sin], -1)
    return torch.stack([cos, cos], -1).flatten(-2), torch.stack([-sin, sin], -1).flatten(-2)


@lru_cache(maxsize=4)
def _cached_factors(positions: range, settings: _RotationSettings, inference: bool) -> tuple[Tensor, Tensor]:
    """Compute rotary factors and cache them, because all layers and many decoding steps use the same positions."""
    del inference  # part of the cache key only
    return _factors(positions, settings)


@lru_cache(maxsize=8)
def _cached_factors_of_one(position: int, settings: _RotationSettings, inference: bool) -> tuple[Tensor, Tensor]:
    """Return views of the rotary factors of a single position, for the queries and keys of all layers of a step."""
    block, place = divmod(position, _BLOCK)
    cos, sin = _cached_factors(range(block * _BLOCK, (block + 1) * _BLOCK), settings, inference)
    return cos.narrow(2, place, 1), sin.narrow(2, place, 1)
