"""Make the backward pass recompute checkpointed layers in the same context in which the forward pass ran them."""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import Any

import torch
from torch.utils.checkpoint import CheckpointFunction

Context = Callable[[], AbstractContextManager[Any]]


def enter_when_recomputed(context: Context) -> bool:
    """Make the running checkpoints enter a context when they are recomputed; return False if this is impossible.

    `torch.utils.checkpoint` stores the checkpointed function in an object that its saved-tensor hook refers to; if it
    is reentrant, in the ``ctx`` of its autograd function.
    """
    for reentrant in _reentrant_checkpoints():
        reentrant.run_function = _within(context, reentrant.run_function)
    pack = innermost_hook()
    name = getattr(pack, "__qualname__", "")
    if pack is None or name.startswith("_recomputation_hook."):
        return True
    if not name.startswith("_checkpoint_hook."):
        return False  # other hooks may hide a checkpoint's hooks, or recompute tensors themselves
    cells = zip(pack.__code__.co_freevars, pack.__closure__ or (), strict=True)
    frame = next((cell.cell_contents for name, cell in cells if name == "frame"), None)
    run = getattr(frame, "recompute_fn", None)
    if frame is None or run is None:
        return False
    frame.recompute_fn = _within(context, run)
    return True


def running_checkpoint() -> int:
    """Return a number that identifies the innermost running checkpoint or saved-tensor hook."""
    return id(next(_reentrant_checkpoints(), None) or innermost_hook())


def _reentrant_checkpoints() -> Iterator[Any]:
    """Yield the ``ctx`` of each running reentrant checkpoint, innermost first; these run without gradients."""
    frame: Any = None if torch.is_grad_enabled() else sys._getframe(1)
    while frame is not None:
        if frame.f_code is CheckpointFunction.forward.__code__:
            yield frame.f_locals["ctx"]
        frame = frame.f_back


def innermost_hook() -> Any:
    """Return the innermost saved-tensor hook that may recompute tensors; hooks of `save_on_cpu` only store tensors."""
    autograd, storing = torch._C._autograd, []
    try:
        while (hooks := autograd._top_saved_tensors_default_hooks(True)) is not None and _only_stores(hooks[0]):
            autograd._pop_saved_tensors_default_hooks()
            storing.append(hooks)
        return None if hooks is None else hooks[0]
    finally:
        for pack, unpack in reversed(storing):
            autograd._push_saved_tensors_default_hooks(pack, unpack)


@contextmanager
def outside_later_hooks(hook: Any) -> Iterator[None]:
    """Suspend the saved-tensor hooks that were entered after ``hook`` within the block; all of them if it has ended.

    A tensor that the model computed before a checkpoint is not part of the checkpoint, which would otherwise save other
    tensors than when it is recomputed.
    """
    autograd, suspended = torch._C._autograd, []
    is_now = innermost_hook() is hook
    try:
        while not is_now and (hooks := autograd._top_saved_tensors_default_hooks(True)) is not None:
            if hooks[0] is hook:
                break
            autograd._pop_saved_tensors_default_hooks()
            suspended.append(hooks)
        yield
    finally:
        for pack, unpack in reversed(suspended):
            autograd._push_saved_tensors_default_hooks(pack, unpack)


def _only_stores(pack: Any) -> bool:
    return getattr(pack, "__module__", "") == "torch.autograd.graph"


def _within(context: Context, run: Any) -> Any:
    """Return a function that runs ``run`` within a context, or ``run`` itself if it already enters the context."""
    if context in getattr(run, "_contexts", ()):
        return run

    @functools.wraps(run)
    def recompute(*args: Any) -> Any:
        with context():
            return run(*args)

    recompute._contexts = (*getattr(run, "_contexts", ()), context)  # type: ignore[attr-defined]
    return recompute
