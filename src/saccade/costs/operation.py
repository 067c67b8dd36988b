"""Step: one operation of a run, as far as its cost goes."""

from __future__ import annotations

from typing import NamedTuple

__all__ = ["Step"]


class Step(NamedTuple):
    """One operation.

    Attributes:
        name: of the operation, such as ``"mm"``; of a product of attention ``"attention:"`` and its kernel.
        flops: floating-point operations of matrix products; 0 of everything else.
        moved: bytes of what it reads and writes, each tensor once.
        size: numbers that come out of it, or of an attention the pairs whose scores it computes.
        shape: of a matrix product ``(batch, rows, inner, columns)``, of an attention ``(tiles, width)``: both widths
            together; else empty.
        dtype: of its numbers, ``"float32"``.
        is_backward: whether it takes the gradients of an attention.
    """

    name: str
    flops: int
    moved: int
    size: int
    shape: tuple[int, ...] = ()
    dtype: str = "float32"
    is_backward: bool = False

    @property
    def kernel(self) -> str | None:
        """The kernel of a product of attention; None of other operations."""
        return self.name.partition(":")[2] or None
