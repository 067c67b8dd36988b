"""The output of a captured attention call, and the gradient with respect to the call's weights."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import NamedTuple

import torch
from torch import Tensor

from saccade.matrix import DenseMatrix, DerivedMatrix, GradientMatrix, Matrix
from saccade.plan import Ranges
from saccade.statistics.row_block import Block

Receive = Callable[[Matrix], None]
"""A callback that receives the gradient with respect to a call's weights."""

Refuse = Callable[[str], None]
"""A callback that receives the reason why this gradient is unavailable."""


class CallOutput(NamedTuple):
    """The output of a captured call, from which the gradient with respect to the call's weights is computed.

    Attributes:
        out: the tensor that the model computed.
        to_heads: converts the gradient with respect to ``out`` to ``[batch, heads, q_len, value_dim]``.
        value: returns the values of the call, ``[batch, kv_heads, kv_len, value_dim]``.
        dropout_p: dropout probability of the call.
    """

    out: Tensor
    to_heads: Callable[[Tensor], Tensor]
    value: Callable[[], Tensor]
    dropout_p: float = 0.0

    def watch(self, receive: Receive, refuse: Refuse) -> None:
        """Request the gradient with respect to the attention weights.

        The backward pass passes the gradient to ``receive``. If there will be no gradient, ``refuse`` is called at once
        with the reason.
        """
        if self.dropout_p:
            return refuse("dropout was applied to its weights; use model.eval() or a dropout of 0")
        if not self.out.requires_grad:
            return refuse("its output requires no gradient, as in a reentrant checkpoint or under torch.no_grad()")
        value = self.value().detach().clone()  # a cache may write into it before the backward pass

        def on_gradient(grad: Tensor) -> None:
            with torch.no_grad():
                receive(GradientMatrix(self.to_heads(grad.detach()).to(value.dtype), value))

        self.out.register_hook(on_gradient)
        return None


class DenseWeights(NamedTuple):
    """Dense weights that a captured call has materialised; autograd computes the gradient with respect to them.

    Attributes:
        weights: the tensor that the model multiplies by the values.
        arrange: converts this tensor, or its gradient, to ``[batch, heads, q_len, kv_len]``.
    """

    weights: Tensor
    arrange: Callable[[Tensor], Tensor]

    def watch(self, receive: Receive, refuse: Refuse) -> None:
        """Request the gradient with respect to the attention weights.

        The backward pass passes the gradient to ``receive``. If there will be no gradient, ``refuse`` is called at once
        with the reason.
        """
        if not self.weights.requires_grad:
            return refuse("its weights require no gradient, as in a reentrant checkpoint or under torch.no_grad()")

        def on_gradient(grad: Tensor) -> None:
            with torch.no_grad():
                receive(DenseMatrix(self.arrange(grad.detach()).clone()))

        self.weights.register_hook(on_gradient)
        return None


class FutureOutput:
    """A placeholder for the output of a call whose layer has not yet multiplied the matrix by values."""

    def __init__(self) -> None:
        self._watchers: list[tuple[Receive, Refuse]] = []

    @property
    def is_watched(self) -> bool:
        """Whether the gradient with respect to the attention weights has been requested."""
        return bool(self._watchers)

    def watch(self, receive: Receive, refuse: Refuse) -> None:
        """Store the callbacks, and pass them to `CallOutput.watch` once the output exists."""
        self._watchers.append((receive, refuse))

    def set_output(self, output: CallOutput) -> None:
        """Set the output, and register all stored callbacks with it."""
        for receive, refuse in self._watchers:
            output.watch(receive, refuse)


class WatchedMatrix(DerivedMatrix):
    """An attention matrix that reports its product with values, so that its gradient can be computed.

    Args:
        inner: the matrix.
        output: the placeholder that receives the product with values.
    """

    def __init__(self, inner: Matrix, output: FutureOutput):
        super().__init__(inner)
        self.output = output

    def matmul(self, value: Tensor, *, dropout_p: float = 0.0, seed: int | None = None) -> Tensor:
        out = self.inner.matmul(value, dropout_p=dropout_p, seed=seed)
        self.output.set_output(CallOutput(out, lambda grad: grad, lambda: value, dropout_p))
        return out

    def blocks(self, batch: int | None = None, head: int | None = None, rows: range | None = None) -> Iterator[Block]:
        return self.inner.blocks(batch, head, rows)

    def positions(self, rows: range, columns: Ranges) -> tuple[Tensor, Tensor]:
        return self.inner.positions(rows, columns)


AnyOutput = CallOutput | DenseWeights | FutureOutput
"""The output of a captured call."""
