"""Detect attention: whether a module weights tokens by content, unlike the fixed coefficients of a convolution."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import BackwardCFunction

_WEIGHTS = ("SoftmaxBackward", "SafeSoftmaxBackward", "ScaledDotProduct", "FlexAttention")
_PRODUCTS = ("BmmBackward", "MmBackward", "BaddbmmBackward", "AddmmBackward")


def attends(rows: Tensor, leaf: Tensor) -> bool:
    """Return whether a module weights tokens by content when it computes ``rows`` from ``leaf``.

    The function searches the autograd graph for a softmax of a tensor that depends on the leaf, a matrix product of two
    tensors that both depend on it, or an operation with a custom backward pass, which may do anything. A convolution,
    a shift of tokens and a recurrence of elementwise operations have none of these.

    Args:
        rows: outputs of a module, with a graph.
        leaf: the inputs of the module.

    Cost: one visit to each node of the graph.
    """
    depends: dict[Any, bool] = {}
    todo = [rows.grad_fn]
    while todo:
        node = todo[-1]
        if node in depends or node is None:
            todo.pop()
            continue
        inner = [one for one, _ in node.next_functions if one is not None]
        waiting = [one for one in inner if one not in depends]
        if waiting:
            todo += waiting
            continue
        todo.pop()
        count = sum(depends[one] for one in inner)
        depends[node] = count > 0 or getattr(node, "variable", None) is leaf
        if _weights(node, count):
            return True
    return False


def reaching_others(rows: Tensor, leaf: Tensor) -> Tensor:
    """Return the tokens that influence the row of any other token, bool ``[batch, length]``.

    The indices of two different tokens differ in at least one bit. So for each bit, the function computes the gradients
    of rows whose index has the bit set with respect to tokens whose index does not, and vice versa.

    Args:
        rows: outputs of a module, ``[batch, length, ...]``, with a graph.
        leaf: the inputs of the module, ``[batch, length, ...]``.

    Cost: two backward passes for each bit of the length.
    """
    found = torch.zeros(rows.shape[:2], dtype=torch.bool)
    draw, number = torch.Generator().manual_seed(0), torch.arange(rows.shape[1])
    weights = torch.randn(rows.shape, generator=draw, dtype=torch.float64).to(rows)
    for bit in range((rows.shape[1] - 1).bit_length()):
        for chosen in ((number >> bit & 1).bool(), ~(number >> bit & 1).bool()):
            selected = weights * chosen.to(rows).view(-1, *[1] * (rows.dim() - 2))
            (size,) = torch.autograd.grad(rows, leaf, selected, retain_graph=True)
            found |= (size.flatten(2).abs().amax(-1) > 0).cpu() & ~chosen
    return found


def _weights(node: Any, count: int) -> bool:
    """Return whether an autograd node, of whose inputs ``count`` depend on the leaf, weights tokens by content."""
    name = node.name()
    is_own = isinstance(node, BackwardCFunction) or "CppNode" in name
    return count > 0 and (is_own or name.startswith(_WEIGHTS) or (count > 1 and name.startswith(_PRODUCTS)))
