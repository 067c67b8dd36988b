"""Tap: what hands out the matrices of a model while the model runs on its own kernels."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn

from saccade.errors import unsupported
from saccade.matrix import Matrix

__all__ = ["Sink", "Valve", "instead_of_forward", "names_of"]

Sink = Callable[[str, Callable[[], Matrix]], None]
"""Given the name of an attention layer, and a function that makes the matrix of the call that has just been run."""


class Valve:
    """Where all taps of one recording flow together: what is inside of a call that was handed out stays silent.

    Args:
        sink: receives each call, after the model's own kernel ran.
    """

    def __init__(self, sink: Sink):
        self._sink = sink
        self._closed = 0

    @contextmanager
    def closed(self) -> Iterator[None]:
        """Hand out nothing meanwhile: the call is known, and what it is made of is not another one."""
        self._closed += 1
        try:
            yield
        finally:
            self._closed -= 1

    def hand_out(self, name: str, make: Callable[[], Matrix]) -> None:
        """Pass a call on, without gradient."""
        if self._closed or _is_recomputed():
            return
        if torch.compiler.is_compiling():
            reason = "a compiled graph runs no Python between its kernels"
            hint = "record the model before it is compiled, or under torch.compiler.set_stance('force_eager')"
            raise unsupported("record", "a compiled model", [reason], hint=hint)
        with torch.no_grad(), self.closed():
            self._sink(name, make)


def names_of(model: nn.Module) -> dict[nn.Module, str]:
    """Modules and their names; the model itself is called by its class."""
    return {module: name or type(model).__name__ for name, module in model.named_modules()}


@contextmanager
def instead_of_forward(module: nn.Module, replacement: Callable[..., Any]) -> Iterator[None]:
    """Let a module run another function as its ``forward``.

    Not a hook: torch's encoder layers leave their fast path where hooks are (pytorch#82919), and say other bits then.
    """
    own = vars(module)
    before = own.get("forward")
    own["forward"] = replacement
    try:
        yield
    finally:
        if before is None:
            del own["forward"]
        else:
            own["forward"] = before


def _is_recomputed() -> bool:
    """Whether this runs within a backward pass: a checkpointed layer, which was handed out the first time."""
    return torch._C._current_graph_task_id() != -1
