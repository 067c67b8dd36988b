"""Base classes of kernels, which depend on checked inputs and plans, but not on mask or score classes."""

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
NO_FORWARD_DERIVATIVES = "it has no forward-mode derivatives, which are needed here"

Tensors = tuple[Tensor | None, ...]
"""Query, key, value, source of the bias and parameters of the score, or the gradients of these tensors."""


class Request(NamedTuple):
    """Options for one product ``A @ value``: kernel, dropout, and whether the lse and a backward pass are needed.

    Attributes:
        dropout_p: probability that a weight is dropped.
        impl: "auto", the name of a kernel, or a kernel.
        seed: dropout seed; drawn from torch's generator when None.
        needs_lse: whether the lse is needed, for example for a sink.
        needs_backward: whether to allow only kernels that compute their own gradients.
    """

    dropout_p: float = 0.0
    impl: str | Kernel = "auto"
    seed: int | None = None
    needs_lse: bool = False
    needs_backward: bool = False


class Verdict(NamedTuple):
    """A kernel's verdict on a request: whether it supports the inputs, and whether another kernel is better.

    Attributes:
        cannot: every reason why the kernel cannot compute the exact result; empty if it can.
        should_skip: reasons why ``impl="auto"`` should skip the kernel although it supports the inputs.
    """

    cannot: tuple[str, ...] = ()
    should_skip: tuple[str, ...] = ()


CAN_RUN = Verdict()


class Backward(NamedTuple):
    """Arguments of a kernel's backward pass: the results of the forward pass, and upstream gradients.

    In the lse, +inf marks empty rows, so that their weights are 0.
    """

    out: Tensor
    lse: Tensor
    grad_out: Tensor
    grad_lse: Tensor | None


def reasons_unless_dot_product(inputs: AttentionInputs) -> list[str]:
    """Return the reasons why a kernel for dot-product scores does not support these inputs."""
    why = []
    if inputs.tile_function is not None:
        why.append("it supports only dot products, and maps that end in one")
    if inputs.modification is not None:
        why.append("it does not call functions of scores")
    return why


def disabled_reasons(inputs: AttentionInputs) -> tuple[str, ...]:
    """Return the reason to skip GPU kernels if ``SACCADE_GPU=tiled`` allows only `tiled`; empty for other settings.

    Raises:
        ValueError: the environment variable is neither "auto" nor "tiled".
    """
    setting = os.environ.get(_VARIABLE, "auto")
    if setting not in _CHOICES:
        raise value_error(_VARIABLE, f"be {' or '.join(_CHOICES)} in the environment", repr(setting))
    return (f"{_VARIABLE}=tiled disables it",) if setting == "tiled" else ()


class Kernel(ABC):
    """Base class of kernels, the implementations of ``A @ value``.

    `saccade.engine.dispatch` chooses a kernel and contains NaN. A subclass must define `forward`. Autograd
    differentiates the operations of a kernel, unless it is a `KernelWithBackward`.

    Attributes:
        name: name of the kernel in ``impl=`` and `explain`.
        has_backward: whether the kernel computes its gradients itself.
        has_second_derivatives: whether autograd can differentiate the backward pass. If not, or if the kernel computes
            its gradients itself, `saccade.engine.second_order` computes second derivatives.
        defers_to: name of the kernel that is faster if this kernel's `verdict` has ``should_skip`` reasons; may be
            empty. If that kernel cannot run, ``impl="auto"`` uses this kernel.
        supports_masked_rows: whether the kernel skips queries and keys that a bias masks. If not, `tiled` runs instead
            when NaN or inf could spread. A kernel that may return no lse must set this to False.
        adds_to_masked: whether the kernel also computes the scores of masked pairs and adds -inf to them. A score that
            overflows then becomes NaN, and `tiled` runs instead.
        is_checked: whether the first run for each kind of product is compared with the definition; see
            `saccade.engine.first_use_check`.
    """

    name: str
    has_backward = False
    has_second_derivatives = True
    defers_to = ""
    supports_masked_rows = True
    adds_to_masked = False
    is_checked = False

    def verdict(self, inputs: AttentionInputs, request: Request) -> Verdict:
        """Return why the kernel does not support these inputs, and why ``impl="auto"`` should skip it.

        If ``request.impl`` is "auto", the verdict may contain only the first reason found. If it names the kernel, the
        verdict must contain all reasons. By default, there are none.
        """
        return CAN_RUN

    def pairs(self, inputs: AttentionInputs) -> int:
        """Return the number of query-key pairs whose scores the kernel computes, summed over batch and heads."""
        return inputs.plan.pairs

    def cost(self, inputs: AttentionInputs, value_dim: int, dropout_p: float) -> Cost:
        """Return the cost of the kernel's forward pass, without running it."""
        reason = "it has no cost estimate: define Kernel.cost"
        raise unsupported(f'impl="{self.name}"', [reason])

    @abstractmethod
    def forward(self, inputs: AttentionInputs, value: Tensor, dropped: Dropped | None) -> tuple[Tensor, Tensor | None]:
        """Run the kernel; return the output ``[batch, heads, q_len, value_dim]`` and lse ``[batch, heads, q_len]``.

        The lse may be None only if `verdict` rejects requests that need it and `supports_masked_rows` is False.
        """


class KernelWithBackward(Kernel):
    """Base class of kernels that compute their gradients themselves."""

    has_backward = True

    @abstractmethod
    def forward(self, inputs: AttentionInputs, value: Tensor, dropped: Dropped | None) -> tuple[Tensor, Tensor]:
        """Run the kernel; return the output ``[batch, heads, q_len, value_dim]`` and lse ``[batch, heads, q_len]``."""

    def backward_bytes(self, inputs: AttentionInputs, value_dim: int) -> int:
        """Return the peak memory of the kernel's backward pass, in bytes, including gradients but not saved tensors."""
        reason = "it has no estimate of backward memory: define KernelWithBackward.backward_bytes"
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
        """Return the gradients of query, key, value, bias source and parameters; None where ``wanted`` is False."""
