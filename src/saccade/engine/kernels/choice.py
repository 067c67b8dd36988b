"""Which kernel runs a product, and why not the others."""

from __future__ import annotations

from typing import NamedTuple, Protocol

from torch import Tensor

from saccade.engine.ingredients import ScoreMatrix
from saccade.engine.kernels.flex import Flex
from saccade.engine.kernels.fused import Fused
from saccade.engine.kernels.reference import Reference
from saccade.engine.kernels.tiled import Tiled
from saccade.engine.memory import Cost
from saccade.errors import unsupported, value_error

__all__ = ["KERNELS", "Choice", "Kernel", "choose"]


class Kernel(Protocol):
    """How a product is executed."""

    name: str

    def reasons(self, scores: ScoreMatrix, dropout_p: float) -> tuple[str, ...]:
        """Why it cannot run these inputs exactly; an empty tuple means that it can."""
        ...

    def cost(self, scores: ScoreMatrix, value_dim: int, dropout_p: float) -> Cost:
        """What the forward product computes and holds; nothing is run."""
        ...

    def pairs(self, scores: ScoreMatrix) -> int:
        """Query-key pairs whose scores the forward product computes, over batch and heads."""
        ...

    def run(
        self, scores: ScoreMatrix, value: Tensor, *, dropout_p: float = 0.0, seed: int | None = None
    ) -> tuple[Tensor, Tensor]:
        """Output and log-sum-exp."""
        ...


KERNELS: tuple[Kernel, ...] = (Fused(), Tiled(), Flex(), Reference())
"""In the order in which they are asked. The tiled kernel runs everything, so that those after it run by name only: the
definition, and FlexAttention, until the laws have been seen to hold for it on a GPU."""


class Choice(NamedTuple):
    """The kernel that runs, and the reasons of those that were passed over."""

    kernel: Kernel
    passed_over: dict[str, tuple[str, ...]]


def choose(scores: ScoreMatrix, dropout_p: float, impl: str) -> Choice:
    """The fastest kernel that is exact for the inputs, or the one asked for by name.

    Raises:
        ValueError: an unknown name.
        UnsupportedError: the kernel asked for cannot run the inputs; every reason is listed.
    """
    passed_over: dict[str, tuple[str, ...]] = {}
    for kernel in KERNELS:
        if impl not in ("auto", kernel.name):
            continue
        reasons = kernel.reasons(scores, dropout_p)
        if not reasons:
            return Choice(kernel, passed_over)
        if impl != "auto":
            raise unsupported(scores.where, f'impl="{impl}"', reasons, hint='impl="auto" finds a kernel that can')
        passed_over[kernel.name] = reasons
    names = ", ".join(repr(name) for name in ("auto", *(kernel.name for kernel in KERNELS)))
    raise value_error(scores.where, "impl", f"be one of {names}", repr(impl))
