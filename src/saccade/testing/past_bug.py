"""The `PastBug` class: a mistake of attention kernels, with a small kernel that makes it."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

from saccade.testing.wrong_kernels import Kernel


class PastBug(NamedTuple):
    """A mistake that a kernel made, and a kernel that makes it.

    Attributes:
        mistake: one sentence about it.
        where: the public report; "cheat" for a way to pass weak tests; "made" for a common mistake without a report.
        laws: names of laws that must find it.
        make: returns the wrong kernel, as fresh as if just imported.
    """

    mistake: str
    where: str
    laws: tuple[str, ...]
    make: Callable[[], Kernel]
