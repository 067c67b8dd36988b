"""Result of a kernel's first run: errors, and whether they are rounding."""

from __future__ import annotations

import dataclasses
from typing import NamedTuple

import torch


class Compared(NamedTuple):
    """One quantity: its largest error among all rows, in parts of the row's own size, and where that is."""

    name: str
    error: float
    place: str


@dataclasses.dataclass(frozen=True)
class FirstUse:
    """Result of comparing some rows of a kernel's product with the definition.

    Attributes:
        kernel: its name.
        place: what it ran on.
        rows: how many were compared.
        limit: the largest error that counts as rounding.
        quantities: output, lse and gradients, as far as they were asked for.
        raised: what it raised instead of an answer; None if it answered.
        shapes: of query, key and value.
        mask: as text.
        dtype, device: of the tensors.
    """

    kernel: str
    place: str
    rows: int
    limit: float
    quantities: tuple[Compared, ...]
    raised: str | None
    shapes: tuple[tuple[int, ...], tuple[int, ...], tuple[int, ...]]
    mask: str
    dtype: torch.dtype
    device: torch.device

    @property
    def ok(self) -> bool:
        """Whether it answered, and every error is rounding."""
        return not self.fault

    @property
    def fault(self) -> str:
        """The error, in a sentence; empty if there was none."""
        if self.raised is not None:
            return f"a product for {self._kind} on {self.place} raised {self.raised}"
        worst = max(self.quantities, key=lambda one: one.error)
        if worst.error <= self.limit:
            return ""
        return (
            f"its first product for {self._kind} on {self.place} differed from the definition: {worst.name} of "
            f"{worst.place} by {worst.error:.2g} of its size, where {self.limit:g} is rounding"
        )

    @property
    def warning(self) -> str:
        """The error, what happens now, and code that reproduces it."""
        kind = f"device={str(self.device)!r}, dtype={self.dtype}"
        shapes = zip(("query", "key", "value"), self.shapes, strict=True)
        lines = [
            f"{self.kernel}: {self.fault}. Another kernel runs such products from now on. To see it again:",
            "import torch",
            "from saccade import testing",
            "from saccade.masks import *",
            *(f"{name} = torch.randn({list(shape)}, {kind})" for name, shape in shapes),
            f"print(testing.first_use({self.kernel!r}, query, key, value, {self.mask}))",
        ]
        return "\n    ".join(lines)

    def raise_if_wrong(self) -> FirstUse:
        """Itself, if all is well.

        Raises:
            AssertionError: something was wrong; the sentence says what.
        """
        if self.fault:
            raise AssertionError(f"{self.kernel}: {self.fault}")
        return self

    def __str__(self) -> str:
        if self.fault:
            return f"{self.kernel}: {self.fault}"
        told = ", ".join(f"{one.name} {one.error:.1g}" for one in self.quantities)
        return f"{self.rows} rows on {self.place} were right within {self.limit:g} of their size ({told})"

    @property
    def _kind(self) -> str:
        return f"{str(self.dtype).removeprefix('torch.')} with {self.mask}"
