"""Capture: collect attention calls while a model runs on its own kernels."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from typing import NamedTuple

import torch
from torch import nn

from saccade.integrations.call_output import AnyOutput
from saccade.matrix import Matrix
from saccade.support.errors import unsupported
from saccade.support.torch_modes import in_backward

CALLED_AS = "record"  # the name in error messages

Make = Callable[[], Matrix]
"""A function that builds the attention matrix of the call that has just run."""


class CapturedMatrix(NamedTuple):
    """A captured call's attention matrix, which is built when this object is called.

    Attributes:
        make: builds the matrix.
        output: provides the gradient with respect to the weights; None if the values of the call are unknown.
    """

    make: Make
    output: AnyOutput | None = None

    def __call__(self) -> Matrix:
        return self.make()


Callback = Callable[[str, CapturedMatrix], None]
"""A function that receives the name of an attention layer and its matrix."""


class Capture:
    """A running capture of attention calls. Calls nested in a captured call are not captured.

    Threads are independent: a captured call suppresses nested calls only in its own thread.

    Args:
        callback: receives each call after the model's own kernel has run, in the same thread.

    Attributes:
        is_active: whether the capture is in progress; calls that end after the capture are not emitted.
        not_recorded: class names, by module name, of modules that seem to compute attention but were not recorded.
    """

    def __init__(self, callback: Callback):
        self._callback = callback
        self._thread = _ThreadState()
        self.is_active = True
        self.not_recorded: dict[str, str] = {}

    @property
    def is_suppressed(self) -> bool:
        """Whether this thread is running a captured call or a callback of any capture, which suppresses capturing."""
        return self._thread.depth > 0 or _callbacks.depth > 0

    @property
    def num_captured(self) -> int:
        """Number of this thread's attention calls so far, captured or noted as not recorded."""
        return self._thread.num_captured

    @contextmanager
    def suppressed(self) -> Iterator[None]:
        """Suppress capturing in this thread within the block, which runs parts of a captured call."""
        self._thread.depth += 1
        try:
            yield
        finally:
            self._thread.depth -= 1

    def emit(self, name: str, make: Make, output: AnyOutput | None = None) -> None:
        """Pass a captured call to the callback, which runs with gradients disabled."""
        if self.is_suppressed or not self.is_active or in_backward():
            return
        refuse_compiled()
        self._thread.num_captured += 1
        _callbacks.depth += 1  # other captures must not observe what the callback computes
        try:
            with torch.no_grad():
                self._callback(name, CapturedMatrix(make, output))
        finally:
            _callbacks.depth -= 1

    def note_not_recorded(self, name: str, kind: str) -> None:
        """Note that a module's attention could not be captured, unless it runs inside a captured call."""
        if self.is_active and not self.is_suppressed:
            self._thread.num_captured += 1
            self.not_recorded.setdefault(name, kind)


class Listener(NamedTuple):
    """A capture, and the name under which it records the calls to one module.

    Attributes:
        name: the module's name in the capture.
        capture: the capture that receives the calls.
    """

    name: str
    capture: Capture


class _ThreadState(threading.local):
    def __init__(self) -> None:  # not class attributes, because Dynamo cannot resolve them while tracing
        self.depth = 0
        self.num_captured = 0


_callbacks = _ThreadState()


@contextmanager
def suppressed(listeners: Iterable[Listener]) -> Iterator[None]:
    """Suppress capturing for the given listeners within the block, which runs parts of a captured call."""
    with ExitStack() as stack:
        for listener in listeners:
            stack.enter_context(listener.capture.suppressed())
        yield


def emit_all(calls: Sequence[tuple[Listener, Make]], output: AnyOutput | None = None) -> None:
    """Pass each captured call to its listener, even if another listener raises an error."""
    if not calls:
        return
    (name, capture), make = calls[0]
    try:
        capture.emit(name, make, output)
    finally:
        emit_all(calls[1:], output)


def refuse_compiled() -> None:
    """Raise `UnsupportedError` if a captured layer is being compiled."""
    if (
        torch.compiler.is_compiling()
    ):  # by its full name: Dynamo does not trace frames that contain neither tensors nor `torch`
        reason = "a compiled graph runs no Python between its kernels"
        hint = "record the model before it is compiled, or under torch.compiler.set_stance('force_eager')"
        raise unsupported("a compiled model", [reason], hint=hint)


def names_of(model: nn.Module) -> dict[nn.Module, str]:
    """Return the names under which a model's modules are captured; the model itself is named after its class."""
    return {module: name or type(model).__name__ for name, module in model.named_modules()}
