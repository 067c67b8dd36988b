"""Checkpoints run a layer again in the backward pass; it must be fused there as it was the first time."""

from __future__ import annotations

import functools
from typing import Any

import torch
from torch.overrides import TorchFunctionMode


def enter_when_recomputed(mode: TorchFunctionMode) -> bool:
    """Make a checkpoint that is being run enter a mode when it is run again; return False if it cannot.

    `torch.utils.checkpoint` keeps the function in an object that its hook for saved tensors refers to.
    """
    hooks = torch._C._autograd._top_saved_tensors_default_hooks(True)
    pack = None if hooks is None else hooks[0]
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
    if mode not in getattr(run, "_saccade_modes", ()):
        frame.recompute_fn = _within(mode, run)
    return True


def _within(mode: TorchFunctionMode, run: Any) -> Any:
    @functools.wraps(run)
    def recompute(*args: Any) -> Any:
        if mode in torch.overrides._get_current_function_mode_stack():
            return run(*args)
        with mode:
            return run(*args)

    recompute._saccade_modes = (*getattr(run, "_saccade_modes", ()), mode)  # type: ignore[attr-defined]
    return recompute
