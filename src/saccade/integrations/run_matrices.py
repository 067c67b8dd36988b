"""Collect the attention matrices that saccade's attention functions multiply by values during a recording."""

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
    """Report an attention matrix before it is multiplied by values, to this thread's innermost `collected_matrices`.

    Attention functions that are registered with another library call this, because no other code knows which mask and
    bias they added to those of the call.
    """
    if not is_tracing() and _thread.lists:
        _thread.lists[-1].append(matrix)


@contextmanager
def collected_matrices() -> Iterator[list[Matrix]]:
    """Yield a list of the attention matrices that this thread reports within the block."""
    matrices: list[Matrix] = []
    _thread.lists.append(matrices)
    try:
        yield matrices
    finally:
        _thread.lists.pop()
