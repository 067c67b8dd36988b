"""Base classes of kernels. A kernel knows checked inputs and plans, but no classes of masks or scores, and no NaN."""

from __future__ import annotations

import os
from abc import ABC, abstractmethod
from typing import NamedTuple

from torch import Tensor

from saccade.engine.dropout import Dropped
from saccade.engine.inputs import AttentionInputs
from saccade.engine.memory_accounting import Cost
from saccade.support.errors import unsupported, value_error

_VARIABLE, _CHOICES = "SACCADE_GPU", ("auto", "tiled")
NO_FORWARD_DERIVATIVES = "its derivatives are taken backwards, and here they are taken forwards"

Tensors = tuple[Tensor | None, ...]
"""Query, key, value, the bias's source and the score's parameters, or their gradients."""


class Request(NamedTuple):
    """Options of one product, and which results it must return.

    Attributes:
        dropout_p: probability that a weight is dropped.
        impl: "auto", the name of a kernel, or a kernel.
        seed: of the dropout; drawn from torch's generator when None.
        needs_lse: whether the lse is used; a sink uses it.
        needs_backward: whether only kernels that compute their own gradients may run.
    """

    dropout_p: float = 0.0
    impl: str | Kernel = "auto"
    seed: int | None = None
    needs_lse: bool = False
    needs_backward: bool = False


class Verdict(NamedTuple):
    """A kernel's answer to a request: whether it can run the inputs, and whether it should.

    Attributes:
        cannot: every reason why it cannot run these inputs exactly; empty if it can.
        rather_not: why ``impl="auto"`` should pass it over, though it can run them.
    """

    cannot: tuple[str, ...] = ()
    rather_not: tuple[str, ...] = ()


CAN_RUN = Verdict()


class Backward(NamedTuple):
    """Results and upstream gradients for a kernel's backward pass.

    The lse of an empty row is +inf, so that its weights are 0.
    """

    out: Tensor
    lse: Tensor
    grad_out: Tensor
    grad_lse: Tensor | None


def reasons_of_dot_products(inputs: AttentionInputs) -> list[str]:
    """Return why a kernel that computes dot products, and no other scores, cannot run these inputs."""
    why = []
    if inputs.tile_function is not None:
        why.append("it has dot products only, and maps that end in one")
    if inputs.modification is not None:
        why.append("it calls no function of scores")
    return why


def left_out(inputs: AttentionInputs) -> tuple[str, ...]:
    """Return why ``impl="auto"`` skips a kernel on a GPU: ``SACCADE_GPU=tiled`` leaves only `tiled`.

    Raises:
        ValueError: the variable is neither "auto" nor "tiled".
    """
    setting = os.environ.get(_VARIABLE, "auto")
    if setting not in _CHOICES:
        raise value_error(_VARIABLE, f"be {' or '.join(_CHOICES)} in the environment", repr(setting))
    return (f"{_VARIABLE}=tiled leaves it out",) if setting == "tiled" else ()


class Kernel(ABC):
    """Base class of kernels: one way to run a product. `saccade.engine.dispatch` chooses one and contains NaN.

    A subclass must define `forward`. Autograd differentiates what it computes, unless it is a `KernelWithBackward`.

    Attributes:
        name: for ``impl=`` and `explain`.
        has_backward: whether it computes its gradients itself.
        has_second_derivatives: whether autograd can differentiate its backward pass. Otherwise, and for kernels with a
            backward pass of their own, `saccade.engine.second_order` computes second derivatives.
        leaves_to: name of a kernel that is faster if this one's `verdict` says "rather not", if there is a particular
            one: if that kernel cannot run, ``impl="auto"`` takes this one.
        supports_masked_rows: whether it leaves out queries and keys that a term of the bias masks. Where it does not,
            `tiled` runs instead if NaN or inf could spread. A kernel that may return no lse must set this to False.
        adds_to_masked: whether it computes the scores of masked pairs too and adds -inf to them. A score that
            overflows becomes NaN then, and `tiled` runs instead.
        is_checked: whether its first run of each kind is compared with the definition (`saccade.engine.kernel_check`).
    """

    name: str
    has_backward = False
    has_second_derivatives = True
    leaves_to = ""
    supports_masked_rows = True
    adds_to_masked = False
    is_checked = False

    def verdict(self, inputs: AttentionInputs, request: Request) -> Verdict:
        """Return why the kernel cannot run these inputs, and why ``impl="auto"`` should pass it over.

        Where ``request.impl`` is "auto" and a reason of either kind is known, the other reasons may be left out: they
        are requested once more, by the kernel's name, before it runs or an error names them. By default, it can run.
        """
        return CAN_RUN

    def pairs(self, inputs: AttentionInputs) -> int:
        """Return the number of query-key pairs whose scores the forward product computes, over batch and heads."""
        return inputs.plan.pairs

    def cost(self, inputs: AttentionInputs, value_dim: int, dropout_p: float) -> Cost:
        """Return the cost of a forward product of the kernel, without running it."""
        reason = "it does not say what it costs: define Kernel.cost"
        raise unsupported(f'impl="{self.name}"', [reason])

    @abstractmethod
    def forward(self, inputs: AttentionInputs, value: Tensor, dropped: Dropped | None) -> tuple[Tensor, Tensor | None]:
        """Run the kernel: return output ``[batch, heads, q_len, value_dim]`` and lse ``[batch, heads, q_len]``.

        The lse may be None only if `verdict` refuses requests that need it, and `supports_masked_rows` is False.
        """


class KernelWithBackward(Kernel):
    """Base class of kernels that compute their gradients themselves."""

    has_backward = True

    @abstractmethod
    def forward(self, inputs: AttentionInputs, value: Tensor, dropped: Dropped | None) -> tuple[Tensor, Tensor]:
        """Run the kernel: return output ``[batch, heads, q_len, value_dim]`` and lse ``[batch, heads, q_len]``."""

    def backward_bytes(self, inputs: AttentionInputs, value_dim: int) -> int:
        """Return the peak bytes of the kernel's backward pass beside saved tensors, gradients included."""
        reason = "it does not say what its backward pass holds: define KernelWithBackward.backward_bytes"
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
        """Return the gradients of query, key, value, the bias's source and parameters; None for unwanted ones."""
