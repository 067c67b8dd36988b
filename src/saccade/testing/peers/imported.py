"""Packages that are tried if they are there."""

from __future__ import annotations

import warnings
from importlib import import_module
from typing import Any

__all__ = ["imported"]


def imported(module: str) -> Any:
    """A module of a package that is optional.

    Raises:
        ModuleNotFoundError: it is not installed.
    """
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # of what later versions of torch deprecate
            return import_module(module)
    except ModuleNotFoundError as missing:
        raise ModuleNotFoundError(f"{missing}; pip install 'saccade[bench]'", name=missing.name) from missing
