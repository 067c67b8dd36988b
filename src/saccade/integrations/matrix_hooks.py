"""Edit the attention matrices of modules that run on saccade, and collect their products with values."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import NamedTuple

from torch import Tensor, nn

from saccade.integrations.call_output import CallOutput
from saccade.masks import Mask
from saccade.matrix import Matrix
from saccade.support.errors import unsupported
from saccade.support.torch_modes import is_tracing

CALLED_AS = "intervene"  # the name in error messages

MakeMatrix = Callable[[Mask | None], Matrix]
"""A function that builds the attention matrix of a call, restricted by an additional mask."""

EDITORS: list[Callable[[nn.Module, MakeMatrix, Matrix], Matrix]] = []
"""One function per active `saccade.intervene` context; calling any one of them applies the edits of all contexts.

A function receives a module, a function that builds the module's matrix with an additional mask, and the matrix, and
returns the edited matrix.
"""


class Product(NamedTuple):
    """An attention matrix that a call multiplied by values, and the output of the product."""

    matrix: Matrix
    output: CallOutput


class _ThreadState(threading.local):
    def __init__(self) -> None:
        self.lists: list[list[Product]] = []


_thread = _ThreadState()


def edited_matrix(module: nn.Module, make: MakeMatrix) -> Matrix:
    """Return the attention matrix that a module multiplies by values, with all `saccade.intervene` edits applied.

    Raises:
        UnsupportedError: edits are active while the program is being compiled, which would make them permanent.
    """
    if not EDITORS:
        return make(None)
    if is_tracing():
        reason = "a compiled program would keep the edits"
        raise unsupported(type(module).__name__, [reason], hint="intervene on the uncompiled model")
    return EDITORS[0](module, make, make(None))


def report_product(matrix: Matrix, value: Tensor, out: Tensor, dropout_p: float) -> None:
    """Add a product of a matrix and values to this thread's innermost `collected_products`.

    Attention functions that are registered with another library call this function, because only they know which masks
    and biases they have added.

    Args:
        matrix: the matrix.
        value: ``[batch, kv_heads, kv_len, value_dim]``.
        out: ``[batch, heads, q_len, value_dim]``.
        dropout_p: dropout probability of the product.
    """
    if not is_tracing() and _thread.lists:
        _thread.lists[-1].append(Product(matrix, CallOutput(out, lambda grad: grad, lambda: value, dropout_p)))


@contextmanager
def collected_products() -> Iterator[list[Product]]:
    """Yield a list that collects the products this thread reports within the block."""
    products: list[Product] = []
    _thread.lists.append(products)
    try:
        yield products
    finally:
        _thread.lists.pop()
