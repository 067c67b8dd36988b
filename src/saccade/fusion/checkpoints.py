"""Make the backward pass fuse attention when it recomputes checkpointed layers, as the forward pass did."""

from __future__ import annotations

import functools
from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any

import torch

Context = Callable[[], AbstractContextManager[Any]]


def enter_when_recomputed(context: Context) -> bool:
    """Make the running checkpoint enter a context when it is recomputed; return False if this is impossible.

    `torch.utils.checkpoint` stores the checkpointed function in an object that its saved-tensor hook refers to.
    """
    pack = top_hook()
    name = getattr(pack, "__qualname__", "")
    if pack is None or name.startswith("_recomputation_hook."):
        return True
    if not name.startswith("_checkpoint_hook."):
        return False  # other hooks may hide a checkpoint's hooks
    cells = zip(pack.__code__.co_freevars, pack.__closure__ or (), strict=True)
    frame = next((cell.cell_contents for name, cell in cells if name == "frame"), None)
    run = getattr(frame, "recompute_fn", None)
    if frame is None or run is None:
        return False
    if context not in getattr(run, "_contexts", ()):
        frame.recompute_fn = _within(context, run)
    return True


def top_hook() -> Any:
    """Return the innermost saved-tensor hook, such as a checkpoint's; None if there is none."""
    hooks = torch._C._autograd._top_saved_tensors_default_hooks(True)
    return None if hooks is None else hooks[0]


def _within(context: Context, run: Any) -> Any:
    @functools.wraps(run)
    def recompute(*args: Any) -> Any:
        with context():
            return run(*args)

    recompute._contexts = (*getattr(run, "_contexts", ()), context)  # type: ignore[attr-defined]
    return recompute
