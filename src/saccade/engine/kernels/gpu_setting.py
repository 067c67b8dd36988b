"""What an environment variable says of kernels on devices other than CPUs."""

from __future__ import annotations

import os

from saccade.engine.inputs import AttentionInputs
from saccade.support.errors import value_error

__all__ = ["left_out"]

_VARIABLE, _CHOICES = "SACCADE_GPU", ("auto", "tiled")


def left_out(inputs: AttentionInputs) -> tuple[str, ...]:
    """Why ``impl="auto"`` leaves out all kernels but `tiled` on a GPU: because ``SACCADE_GPU=tiled`` says so.

    Raises:
        ValueError: the variable says something else than "auto" or "tiled".
    """
    told = os.environ.get(_VARIABLE, "auto")
    if told not in _CHOICES:
        raise value_error(_VARIABLE, f"be {' or '.join(_CHOICES)} in the environment", repr(told))
    return (f"{_VARIABLE}=tiled leaves it out",) if told == "tiled" else ()
