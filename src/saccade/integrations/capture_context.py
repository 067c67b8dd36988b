"""Valve: hands out the matrices of a model while the model runs on its own kernels."""

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
"""Makes the matrix of the call that has just been run."""

Sink = Callable[[str, Make], None]
"""Given the name of an attention layer, and what makes its matrix."""


class Valve:
    """Collects the calls that the taps of one recording hear. Calls within a call that was handed out are left out.

    Each thread counts for itself: a call in one of them leaves out nothing of another.

    Args:
        sink: receives each call, after the model's own kernel ran, in the thread that ran it.

    Attributes:
        is_open: whether the recording goes on; what ends after it is not handed out.
        unheard: modules that seem to attend, and of which a call was not handed out, with the names of their classes.
    """

    def __init__(self, sink: Sink):
        self._sink = sink
        self._here = _Here()
        self.is_open = True
        self.unheard: dict[str, str] = {}

    @property
    def is_closed(self) -> bool:
        """Whether this thread is within a call that is known."""
        return self._here.closed > 0

    @property
    def spoken(self) -> int:
        """How many calls of this thread were handed out, or noted as unheard."""
        return self._here.spoken

    @contextmanager
    def closed(self) -> Iterator[None]:
        """Hand out nothing of this thread meanwhile: what a known call is made of is not another one."""
        self._here.closed += 1
        try:
            yield
        finally:
            self._here.closed -= 1

    def hand_out(self, name: str, make: Make) -> None:
        """Pass a call on, without gradient."""
        if self.is_closed or not self.is_open or is_recomputed():
            return
        refuse_compiled()
        self._here.spoken += 1
        with torch.no_grad(), self.closed():
            self._sink(name, make)

    def note_unheard(self, name: str, kind: str) -> None:
        """Remember a module of which a call was not handed out, unless it belongs to a call that is known."""
        if self.is_open and not self.is_closed:
            self._here.spoken += 1
            self.unheard.setdefault(name, kind)


class Ear(NamedTuple):
    """A recording that listens to a module.

    Attributes:
        name: what the recording calls the module.
        valve: of the recording.
    """

    name: str
    valve: Valve


class _Here(threading.local):
    def __init__(self) -> None:  # not attributes of the class, which a compiler that traces this looks for in vain
        self.closed = 0
        self.spoken = 0


@contextmanager
def closed(ears: Iterable[Ear]) -> Iterator[None]:
    """Hand out nothing meanwhile, for all who listen: what a known call runs is part of it."""
    with ExitStack() as stack:
        for ear in ears:
            stack.enter_context(ear.valve.closed())
        yield


def hand_out(calls: Sequence[tuple[Ear, Make]]) -> None:
    """Pass a call on to all who listen, also where one of them raises."""
    if not calls:
        return
    (name, valve), make = calls[0]
    try:
        valve.hand_out(name, make)
    finally:
        hand_out(calls[1:])


def refuse_compiled() -> None:
    """Raise where a layer is being compiled.

    Raises:
        UnsupportedError: it is.
    """
    if is_tracing():
        reason = "a compiled graph runs no Python between its kernels"
        hint = "record the model before it is compiled, or under torch.compiler.set_stance('force_eager')"
        raise unsupported("a compiled model", [reason], hint=hint)


def names_of(model: nn.Module) -> dict[nn.Module, str]:
    """Modules and their names; the model itself is called by its class."""
    return {module: name or type(model).__name__ for name, module in model.named_modules()}


def speaks_attention_interface(module: nn.Module) -> bool:
    """Whether a module's source file asks transformers for its attention function."""
    return hasattr(sys.modules.get(type(module).__module__), "ALL_ATTENTION_FUNCTIONS")


def is_recomputed() -> bool:
    """Whether this runs within a backward pass: a checkpointed layer, which was handed out the first time."""
    return torch._C._current_graph_task_id() != -1
