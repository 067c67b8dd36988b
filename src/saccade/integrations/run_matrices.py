"""Change and collect the attention matrices of modules that run on saccade before they are multiplied by values."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from torch import nn

from saccade.masks import Mask
from saccade.matrix import Matrix
from saccade.support.errors import unsupported
from saccade.support.torch_modes import is_tracing

CALLED_AS = "intervene"  # the name in error messages

MakeMatrix = Callable[[Mask | None], Matrix]
"""Returns the attention matrix of a call, with one more mask."""

EDITORS: list[Callable[[nn.Module, MakeMatrix, Matrix], Matrix]] = []
"""Once for each active `saccade.intervene`, the function that applies all edits: it receives a module, a function that
makes its matrix with one more mask, and the matrix, and returns the matrix that is used instead."""


class _ThreadState(threading.local):
    def __init__(self) -> None:
        self.lists: list[list[Matrix]] = []


_thread = _ThreadState()


def run_matrix(module: nn.Module, make: MakeMatrix) -> Matrix:
    """Return the attention matrix that a module multiplies by values, after all edits.

    The matrix is also reported to this thread's innermost `collected_matrices`. Attention functions that are registered
    with another library call this, because no other code knows which mask and bias they added to those of the call.
    """
    matrix = edited_matrix(module, make, make(None))
    if not is_tracing() and _thread.lists:
        _thread.lists[-1].append(matrix)
    return matrix


def edited_matrix(module: nn.Module, make: MakeMatrix, matrix: Matrix) -> Matrix:
    """Return the attention matrix of a module after all edits.

    Raises:
        UnsupportedError: there are edits, and the program is being compiled, which would keep them.
    """
    if EDITORS and is_tracing():
        reason = "a compiled program would keep the edits"
        raise unsupported(type(module).__name__, [reason], hint="intervene on the model that is not compiled")
    return EDITORS[0](module, make, matrix) if EDITORS else matrix


@contextmanager
def collected_matrices() -> Iterator[list[Matrix]]:
    """Yield a list of the attention matrices that this thread reports within the block."""
    matrices: list[Matrix] = []
    _thread.lists.append(matrices)
    try:
        yield matrices
    finally:
        _thread.lists.pop()
