"""Detect another distribution whose package is also called `saccade` and installed in the same folder."""

from __future__ import annotations

from pathlib import Path


def check_only_distribution(package: Path) -> None:
    """Raise an error if another distribution called ``saccade`` is installed in the folder of this package.

    Args:
        package: the folder of the package.

    Raises:
        ImportError: there is another distribution. The message explains how to remove it.
    """
    other = next(package.parent.glob("saccade-[0-9]*.dist-info"), None)
    if other is not None:
        name, _, version = other.name.removesuffix(".dist-info").partition("-")
        both = f"saccade-attention and {name} {version}, in {package.parent}"
        way_out = "pip uninstall -y saccade && pip install --force-reinstall --no-deps saccade-attention"
        raise ImportError(f"saccade: the import name must belong to one distribution; got {both}.\nHint: {way_out}")
