"""Machine: what a rank is assumed to do, so that plans can be compared."""

from __future__ import annotations

import dataclasses

__all__ = ["Machine"]


@dataclasses.dataclass(frozen=True)
class Machine:
    """What a rank is assumed to do: numbers to compare plans by, not measurements.

    Args:
        flops: of attention, a second.
        bandwidth: bytes that a rank sends and receives, a second.
        latency: seconds that a round takes, however little is sent.
    """

    flops: float = 400e12
    bandwidth: float = 50e9
    latency: float = 20e-6
