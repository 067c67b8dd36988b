"""Capture: collects attention calls while a model runs on its own kernels."""

from __future__ import annotations

import sys
import threading
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from typing import NamedTuple

import torch
from torch import nn

from saccade.matrix import Matrix
from saccade.support.errors import unsupported
from saccade.support.torch_modes import is_tracing

CALLED_AS = "record"  # in errors

Make = Callable[[], Matrix]
"""A function that makes the matrix of the call that has just run."""

Callback = Callable[[str, Make], None]
"""A function that takes the name of an attention layer and a function that makes the matrix."""


class Capture:
    """The attention calls of one recording. Calls within a captured call are left out.

    Threads are independent: a call in one of them suppresses nothing in another.

    Args:
        callback: receives each call, after the model's own kernel ran, in the thread that ran it.

    Attributes:
        is_active: whether the recording goes on; calls that end later are not emitted.
        not_recorded: class names, by name, of modules that seem to attend and of which no matrix was recorded.
    """

    def __init__(self, callback: Callback):
        self._callback = callback
        self._thread = _ThreadState()
        self.is_active = True
        self.not_recorded: dict[str, str] = {}

    @property
    def is_suppressed(self) -> bool:
        """Whether this thread is within a captured call."""
        return self._thread.depth > 0

    @property
    def num_captured(self) -> int:
        """The number of calls of this thread that were emitted, or noted as not recorded."""
        return self._thread.num_captured

    @contextmanager
    def suppressed(self) -> Iterator[None]:
        """Emit nothing of this thread within the block: the calls within a captured call are part of it."""
        self._thread.depth += 1
        try:
            yield
        finally:
            self._thread.depth -= 1

    def emit(self, name: str, make: Make) -> None:
        """Pass a call to the callback, without gradient."""
        if self.is_suppressed or not self.is_active or is_recomputed():
            return
        refuse_compiled()
        self._thread.num_captured += 1
        with torch.no_grad(), self.suppressed():
            self._callback(name, make)

    def note_not_recorded(self, name: str, kind: str) -> None:
        """Note a module of which no matrix was captured, unless it is part of a captured call."""
        if self.is_active and not self.is_suppressed:
            self._thread.num_captured += 1
            self.not_recorded.setdefault(name, kind)


class Listener(NamedTuple):
    """A capture that listens to a module.

    Attributes:
        name: the module's name in the recording.
        capture: the recording's capture.
    """

    name: str
    capture: Capture


class _ThreadState(threading.local):
    def __init__(self) -> None:  # no class attributes: Dynamo does not find these when it traces
        self.depth = 0
        self.num_captured = 0


@contextmanager
def suppressed(listeners: Iterable[Listener]) -> Iterator[None]:
    """Emit nothing to these listeners within the block: the calls within a captured call are part of it."""
    with ExitStack() as stack:
        for listener in listeners:
            stack.enter_context(listener.capture.suppressed())
        yield


def emit_all(calls: Sequence[tuple[Listener, Make]]) -> None:
    """Emit a call to all listeners, even if one of them raises."""
    if not calls:
        return
    (name, capture), make = calls[0]
    try:
        capture.emit(name, make)
    finally:
        emit_all(calls[1:])


def refuse_compiled() -> None:
    """Raise `UnsupportedError` if a layer is being compiled."""
    if is_tracing():
        reason = "a compiled graph runs no Python between its kernels"
        hint = "record the model before it is compiled, or under torch.compiler.set_stance('force_eager')"
        raise unsupported("a compiled model", [reason], hint=hint)


def names_of(model: nn.Module) -> dict[nn.Module, str]:
    """Return the name of each module; the model itself has the name of its class."""
    return {module: name or type(model).__name__ for name, module in model.named_modules()}


def uses_attention_interface(module: nn.Module) -> bool:
    """Return whether a module's source file gets its attention function from transformers' interface."""
    return hasattr(sys.modules.get(type(module).__module__), "ALL_ATTENTION_FUNCTIONS")


def is_recomputed() -> bool:
    """Return whether a backward pass runs: a checkpointed layer is recomputed, and was captured the first time."""
    return torch._C._current_graph_task_id() != -1
