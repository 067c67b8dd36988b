"""Load the files of cases."""

from __future__ import annotations

import importlib
import importlib.util
import pkgutil
from pathlib import Path

import torch

from benchmarks.code_bases import installed, styles

# PyPI's torchvision is compiled for torch with CUDA. With another torch, its import fails where it declares the shapes
# of these operators, which no model here calls.
_OPERATORS = ("nms", "qnms")
_kept: list[torch.library.Library] = []  # definitions end with their library


def load() -> None:
    """Import all files of cases. The packages themselves are imported when a model is made."""
    _declare_operators()
    for folder in (styles, installed):
        for one in pkgutil.iter_modules(folder.__path__, f"{folder.__name__}."):
            importlib.import_module(one.name)


def _declare_operators() -> None:
    found = importlib.util.find_spec("torchvision")
    if found is None or found.origin is None or _kept:
        return
    try:
        for path in Path(found.origin).parent.glob("_C*.so"):
            torch.ops.load_library(str(path))
    except OSError:
        library = torch.library.Library("torchvision", "FRAGMENT")
        for name in _OPERATORS:
            library.define(f"{name}(Tensor dets, Tensor scores, float iou_threshold) -> Tensor")
        _kept.append(library)
