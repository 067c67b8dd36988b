"""Seconds: how long runs take, as far as it can be told before them."""

from __future__ import annotations

from typing import NamedTuple

from saccade.costs.machine import FACTOR

__all__ = ["Seconds"]


class Seconds(NamedTuple):
    """Seconds of a run, a training step and one token more; each may be off by `saccade.costs.FACTOR`, either way."""

    forward: float
    training: float
    decode: float | None

    def __str__(self) -> str:
        told = {name: time for name, time in self._asdict().items() if time is not None}
        width = max(map(len, told))
        return "\n".join(
            f"{name:<{width}}  {_time(time):>8}  ({_time(time / FACTOR)} to {_time(time * FACTOR)})"
            for name, time in told.items()
        )


def _time(seconds: float) -> str:
    for unit, size in (("s", 1.0), ("ms", 1e-3)):
        if seconds >= size:
            return f"{seconds / size:.3g} {unit}"
    return f"{seconds / 1e-6:.3g} µs"
