"""Counting what an algorithm does: operations of its matrix products, and bytes of what it makes."""

from __future__ import annotations

from collections.abc import Callable

from torch.utils.flop_counter import FlopCounterMode

from saccade.testing.laws.memory import largest_tensor

__all__ = ["flops", "largest_tensor"]


def flops(compute: Callable[[], object]) -> int:
    """Floating-point operations of all matrix products, two for each multiplication and addition."""
    with FlopCounterMode(display=False) as counter:
        compute()
    return int(counter.get_total_flops())
