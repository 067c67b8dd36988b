"""The `PastBug` class: a known mistake in attention kernels, with a small kernel that makes it."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

from saccade.testing.plain_kernel import Kernel


class PastBug(NamedTuple):
    """A known mistake in attention kernels, with a small kernel that makes it.

    Attributes:
        mistake: the mistake in one sentence.
        where: the public bug report; "cheat" for a way to pass weak tests; "made" for a common, unreported mistake.
        laws: names of the laws that must detect the mistake.
        make: a function that builds a new wrong kernel, without state from earlier calls.
    """

    mistake: str
    where: str
    laws: tuple[str, ...]
    make: Callable[[], Kernel]
