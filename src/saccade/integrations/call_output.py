"""The output of a captured attention call, from which the gradient by its weights is computed."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor

from saccade.matrix import DenseMatrix, GradientMatrix, Matrix


class CallOutput(NamedTuple):
    """The output of a captured call, from which gradients by its weights are computed.

    Attributes:
        out: the tensor that the model computed.
        to_heads: converts a gradient by ``out`` to ``[batch, heads, q_len, value_dim]``.
        value: returns the values of the call, ``[batch, kv_heads, kv_len, value_dim]``.
        dropout_p: probability with which the call dropped weights.
    """

    out: Tensor
    to_heads: Callable[[Tensor], Tensor]
    value: Callable[[], Tensor]
    dropout_p: float = 0.0

    def watch(self, receive: Callable[[Matrix], None]) -> str:
        """Call ``receive`` with the gradient by the weights in the backward pass; return why not, or ""."""
        if self.dropout_p:
            return "its weights were dropped out at random; model.eval() or dropout 0 is exact"
        if not self.out.requires_grad:
            return "its output needs no gradient"
        value = self.value().detach().clone()  # a cache may write into it before the backward pass

        def on_gradient(grad: Tensor) -> None:
            with torch.no_grad():
                receive(GradientMatrix(self.to_heads(grad.detach()).to(value.dtype), value))

        self.out.register_hook(on_gradient)
        return ""


class BuiltWeights(NamedTuple):
    """The weights that a captured call has built, whose gradient autograd computes.

    Attributes:
        weights: the tensor that the model multiplies by values.
        arrange: converts it to ``[batch, heads, q_len, kv_len]``.
    """

    weights: Tensor
    arrange: Callable[[Tensor], Tensor]

    def watch(self, receive: Callable[[Matrix], None]) -> str:
        """Call ``receive`` with the gradient by the weights in the backward pass; return why not, or ""."""
        if not self.weights.requires_grad:
            return "its weights need no gradient"

        def on_gradient(grad: Tensor) -> None:
            with torch.no_grad():
                receive(DenseMatrix(self.arrange(grad.detach()).clone()))

        self.weights.register_hook(on_gradient)
        return ""
