"""Fuse attention in checkpointed layers when the backward pass recomputes them, as in the first run."""

from __future__ import annotations

import functools
from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any

import torch

Context = Callable[[], AbstractContextManager[Any]]


def enter_when_recomputed(context: Context) -> bool:
    """Make the running checkpoint enter a context when it is recomputed; return False if that is not possible.

    `torch.utils.checkpoint` stores the checkpointed function in an object that its hook for saved tensors refers to.
    """
    pack = top_hook()
    name = getattr(pack, "__qualname__", "")
    if pack is None or name.startswith("_recomputation_hook."):
        return True
    if not name.startswith("_checkpoint_hook."):
        return False  # other hooks may hide those of a checkpoint
    cells = zip(pack.__code__.co_freevars, pack.__closure__ or (), strict=True)
    frame = next((cell.cell_contents for name, cell in cells if name == "frame"), None)
    run = getattr(frame, "recompute_fn", None)
    if frame is None or run is None:
        return False
    if context not in getattr(run, "_contexts", ()):
        frame.recompute_fn = _within(context, run)
    return True


def top_hook() -> Any:
    """Return the innermost hook that saves tensors for a backward pass, such as a checkpoint's, or None."""
    hooks = torch._C._autograd._top_saved_tensors_default_hooks(True)
    return None if hooks is None else hooks[0]


def _within(context: Context, run: Any) -> Any:
    @functools.wraps(run)
    def recompute(*args: Any) -> Any:
        with context():
            return run(*args)

    recompute._contexts = (*getattr(run, "_contexts", ()), context)  # type: ignore[attr-defined]
    return recompute
