"""Writes a figure so that nobody ever finds half a file."""

import os
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from matplotlib.figure import Figure

__all__ = ["save"]


def save(figure: "Figure", path: str | os.PathLike[str]) -> Path:
    """Write ``figure`` to ``path``, whose ending names the format (``.png``, ``.svg``, ``.pdf``).

    The picture is written beside its destination and renamed when it is complete: a reader sees the old file
    or the new one, and an interrupted run leaves neither half.

    Returns:
        The path written.

    Raises:
        ValueError: matplotlib knows no such format.
        OSError: the folder does not exist or may not be written.
    """
    destination = Path(path)
    beside = destination.with_name(f".{destination.name}.{os.getpid()}.part")
    try:
        figure.savefig(beside, format=destination.suffix.removeprefix(".") or "png")
        os.replace(beside, destination)
    finally:
        beside.unlink(missing_ok=True)
    return destination
