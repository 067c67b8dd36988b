"""Collect the matrices that saccade's attention functions multiply by, while a recording runs them."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager

from saccade.matrix import Matrix
from saccade.support.torch_modes import is_tracing


class _ThreadState(threading.local):
    def __init__(self) -> None:
        self.lists: list[list[Matrix]] = []


_thread = _ThreadState()


def report_matrix(matrix: Matrix) -> None:
    """Add a matrix that is about to be multiplied to the innermost list of `collected_matrices` of this thread.

    An attention function that is registered with another library calls this with the matrix that it multiplies: only
    the function knows which mask and which terms it added to those of the call.
    """
    if not is_tracing() and _thread.lists:
        _thread.lists[-1].append(matrix)


@contextmanager
def collected_matrices() -> Iterator[list[Matrix]]:
    """Yield a list of the matrices that this thread reports within the block."""
    matrices: list[Matrix] = []
    _thread.lists.append(matrices)
    try:
        yield matrices
    finally:
        _thread.lists.pop()
