"""Kernel: how a product is run. A kernel knows ingredients and plans, never masks or scores by class, nor NaN."""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import NamedTuple

from torch import Tensor

from saccade.engine.dropout import Dropped
from saccade.engine.inputs import AttentionInputs
from saccade.engine.memory_accounting import Cost
from saccade.support.errors import unsupported

__all__ = ["NO_FORWARD_DERIVATIVES", "Backward", "Kernel", "KernelByHand", "Tensors", "reasons_of_dot_products"]

NO_FORWARD_DERIVATIVES = "its derivatives are taken backwards, and here they are taken forwards"

Tensors = tuple[Tensor | None, ...]
"""Query, key, value, the bias's source and the score's parameters, or their gradients."""


class Backward(NamedTuple):
    """What a backward pass starts from; the lse is +inf where a row sees nothing, so that its weights are 0."""

    out: Tensor
    lse: Tensor
    grad_out: Tensor
    grad_lse: Tensor | None


def reasons_of_dot_products(inputs: AttentionInputs) -> list[str]:
    """Why a kernel that computes dot products, and nothing else of scores, cannot run these inputs."""
    why = []
    if inputs.tile_function is not None:
        why.append("it has dot products only, and maps that end in one")
    if inputs.modification is not None:
        why.append("it calls no function of scores")
    return why


class Kernel(ABC):
    """How a product is run. `saccade.engine.dispatch` chooses one, and keeps NaN where it may be seen.

    A subclass must define `forward`. Autograd goes back through what it computes, unless it is a `KernelByHand`.

    Attributes:
        name: what ``impl=`` and `explain` call it.
        by_hand: whether it computes its gradients itself.
        has_second_derivatives: whether autograd can go back through its backward pass too. Otherwise, and for kernels
            that compute gradients themselves, `saccade.engine.second_order` has them.
        is_choosy: whether ``impl="auto"`` asks `suits` before it asks for reasons.
        leaves_to: name of the kernel that is faster where it has `drawbacks`, if it is one in particular: where that
            one cannot run, ``impl="auto"`` does not pass it over.
        hides: whether it leaves out the queries and keys that a term of the bias hides. Instead of one that does not,
            `tiled` runs where NaN or inf could pass.
        adds_to_hidden: whether it computes the scores of hidden pairs too and adds -inf to them: one that overflows
            becomes NaN, and `tiled` runs instead.
        is_checked: whether its first run of each kind is compared with the definition (`saccade.engine.kernel_check`).
    """

    name: str
    by_hand = False
    has_second_derivatives = True
    is_choosy = False
    leaves_to = ""
    hides = True
    adds_to_hidden = False
    is_checked = False

    def reasons(self, inputs: AttentionInputs, dropout_p: float) -> tuple[str, ...]:
        """Why it cannot run these inputs exactly; an empty tuple, the default, means that it can."""
        return ()

    def suits(self, inputs: AttentionInputs, dropout_p: float) -> bool:
        """Whether it belongs here at all: `explain` does not name it otherwise."""
        return True

    def drawbacks(self, inputs: AttentionInputs, dropout_p: float) -> tuple[str, ...]:
        """Why ``impl="auto"`` passes it over, though it could run these inputs; empty if it does not."""
        return ()

    def reasons_of_lse(self, inputs: AttentionInputs) -> tuple[str, ...]:
        """Why it cannot give the lse, where that is asked for; empty if it can."""
        return ()

    def pairs(self, inputs: AttentionInputs) -> int:
        """Query-key pairs whose scores the forward product computes, over batch and heads."""
        return inputs.plan.pairs

    def cost(self, inputs: AttentionInputs, value_dim: int, dropout_p: float) -> Cost:
        """What the forward product computes and holds; nothing is run."""
        reason = "it does not say what it costs: define Kernel.cost"
        raise unsupported(f'impl="{self.name}"', [reason])

    @abstractmethod
    def forward(self, inputs: AttentionInputs, value: Tensor, dropped: Dropped | None) -> tuple[Tensor, Tensor | None]:
        """Output ``[batch, heads, q_len, value_dim]`` and lse ``[batch, heads, q_len]``.

        The lse may be None only where `reasons_of_lse` says why.
        """


class KernelByHand(Kernel):
    """A kernel that computes its gradients itself."""

    by_hand = True

    @abstractmethod
    def forward(self, inputs: AttentionInputs, value: Tensor, dropped: Dropped | None) -> tuple[Tensor, Tensor]:
        """Output ``[batch, heads, q_len, value_dim]`` and lse ``[batch, heads, q_len]``."""

    def backward_bytes(self, inputs: AttentionInputs, value_dim: int) -> int:
        """Most bytes that the backward pass holds beside what the forward pass keeps, gradients included."""
        reason = "it does not say what its backward pass holds: define KernelByHand.backward_bytes"
        raise unsupported(f'impl="{self.name}"', [reason])

    @abstractmethod
    def backward(
        self,
        inputs: AttentionInputs,
        value: Tensor,
        dropped: Dropped | None,
        results: Backward,
        wanted: tuple[bool, ...],
    ) -> Tensors:
        """Gradients of query, key, value, the bias's source and the score's parameters; None where not wanted."""
