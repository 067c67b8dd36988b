"""Dense: a mask defined by a bool tensor."""

from __future__ import annotations

import dataclasses
import math

import torch
from torch import Tensor

from saccade.masks.mask import EVERYWHERE, Domain, Mask
from saccade.masks.mask_fields import check_readable
from saccade.support.argument_hints import argument_hints
from saccade.support.errors import kind, type_error, value_error
from saccade.support.torch_modes import is_plain, is_tracing

_MANY = 1 << 16  # smallest number of entries for which a test for consecutive indices pays off

NO_BOOL = "convert a 0/1 mask with mask.bool(); pass terms that are added to scores as bias="


@argument_hints()
@dataclasses.dataclass(frozen=True, eq=False)
class Dense(Mask):
    """A mask defined by a bool tensor; True = may attend.

    Row r of a tensor with L rows and S columns is at position S - L + r (bottom-right), and column c is at position c.
    Positions outside the tensor attend to nothing and are never visible; attention over them raises an error. A batch
    or head axis of size 1 applies to all items or heads, a single row to every query (``[batch, 1, 1, kv]``), and a
    single row and column to all pairs. Two dimensions always mean ``[q, kv]``, as in torch; pass a padding mask
    ``[batch, kv]`` as ``tensor[:, None, None, :]``.

    For large inputs, the pattern of the tensor is recognised once, and again after torch has counted a write to it;
    torch does not count writes through ``tensor.data``.

    >>> print(Dense(torch.tensor([[True, False], [True, True]])).picture(2))
    1 .
    1 1

    Args:
        allowed: bool ``[q, kv]``, ``[batch, q, kv]`` or ``[batch, heads, q, kv]``; it is not copied.

    Raises:
        TypeError: ``allowed`` is not a bool tensor.
        ValueError: the tensor has more than four dimensions, or is sparse or nested.
    """

    allowed: Tensor
    is_value = False

    def __post_init__(self) -> None:
        allowed = self.allowed
        if isinstance(allowed, Tensor) and not allowed.is_meta:  # shapes can be computed without values
            check_readable("allowed", allowed)
        if not isinstance(allowed, Tensor) or allowed.dtype != torch.bool:
            got = str(allowed.dtype if isinstance(allowed, Tensor) else kind(allowed)).removeprefix("torch.")
            raise type_error("allowed", "be a bool tensor, True = may attend", got, hint=NO_BOOL)
        if allowed.dim() > 4:
            raise value_error("allowed", "have at most 4 dimensions", list(allowed.shape))
        if allowed.dim() == 3:
            allowed = allowed[:, None]
        object.__setattr__(self, "allowed", allowed.reshape((1,) * (4 - allowed.dim()) + allowed.shape))

    @property
    def shape(self) -> tuple[int, int]:
        return (self.allowed.shape[0], self.allowed.shape[1])

    @property
    def domain(self) -> Domain:
        _, _, rows, columns = self.allowed.shape
        if rows == columns == 1:
            return EVERYWHERE
        return Domain(None if rows == 1 else range(columns - rows, columns), range(columns))

    @property
    def hides_keys_only(self) -> bool:
        return self.allowed.shape[1:3] == (1, 1)

    def allows(self, b: Tensor, h: Tensor, q: Tensor, kv: Tensor) -> Tensor:
        allowed = self.allowed.to(q.device)
        batch, heads, rows, columns = allowed.shape
        part = _consecutive_part(allowed, (b, h, q - (columns - rows), kv)) if rows > 1 else None
        if part is not None:
            return part
        if 0 in allowed.shape:
            return (b != b) | (h != h) | (q != q) | (kv != kv)
        inside = (q == q) & (kv == kv)
        # Index an axis of size 1 with the int 0, since zeros in the shape of b or h would enlarge the result.
        row: Tensor | int = 0
        column: Tensor | int = 0
        if rows > 1:
            row = q - (columns - rows)
            inside = inside & (row >= 0) & (row < rows)
            row = row.clamp(0, rows - 1)
        if rows > 1 or columns > 1:
            inside = inside & (kv >= 0) & (kv < columns)
            column = kv.clamp(0, columns - 1)
        return allowed[b if batch > 1 else 0, h if heads > 1 else 0, row, column] & inside

    def tensors(self) -> tuple[Tensor, ...]:
        return (self.allowed,)

    def __repr__(self) -> str:
        return f"Dense(shape={list(self.allowed.shape)})"


def _consecutive_part(allowed: Tensor, index: tuple[Tensor, ...]) -> Tensor | None:
    """Copy dense-mask entries at consecutive indices, ten times as fast as indexing; return None for other indices."""
    if is_tracing() or math.prod([x.numel() for x in index]) < _MANY:
        return None
    if not (allowed.is_cpu and all(map(is_plain, (allowed, *index)))):
        return None
    spans = []
    for axis, size in enumerate(allowed.shape):
        span = (
            slice(0, 1) if size == 1 and axis < 2 else _consecutive_range(index[axis], axis)
        )  # one item or head applies to all
        if span is None or span.start < 0 or span.stop > size:
            return None
        spans.append(span)
    return allowed[tuple(spans)].clone()


def _consecutive_range(x: Tensor, axis: int) -> slice | None:
    """Return indices into an axis of a dense mask as a slice; None if they are not consecutive."""
    numbers = x.reshape(-1)
    first, stop = int(numbers[0]), int(numbers[-1]) + 1
    is_axis = x.dim() == 4 and x.shape[axis] == len(numbers) == stop - first
    return slice(first, stop) if is_axis and torch.equal(numbers, torch.arange(first, stop, device="cpu")) else None
