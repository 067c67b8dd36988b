"""Collect the attention matrices that saccade's functions apply to values during a recording."""

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
    """Add a matrix that is about to be applied to values to this thread's innermost `collected_matrices` list.

    Attention functions registered with another library call this, because only the function knows which mask and terms
    it added to those of the call.
    """
    if not is_tracing() and _thread.lists:
        _thread.lists[-1].append(matrix)


@contextmanager
def collected_matrices() -> Iterator[list[Matrix]]:
    """Yield a list that collects the matrices that this thread reports within the block."""
    matrices: list[Matrix] = []
    _thread.lists.append(matrices)
    try:
        yield matrices
    finally:
        _thread.lists.pop()
