"""The product ``A @ value``: choose a kernel, put the rows in order, run, and keep NaN where it may be seen.

`route_of` is read by `product` and by `AttentionMatrix.explain`: what is told is what runs.
"""

from __future__ import annotations

from functools import partial
from typing import NamedTuple, cast

import torch
from torch import Tensor

from saccade.engine import autograd, dropout, kernel_check, nonfinite
from saccade.engine.bias.sink_logit import with_sink
from saccade.engine.dropout import Dropped
from saccade.engine.inputs import AttentionInputs
from saccade.engine.kernels.flex import Flex
from saccade.engine.kernels.fused import Fused
from saccade.engine.kernels.kernel import Kernel
from saccade.engine.kernels.native import Native
from saccade.engine.kernels.reference import Reference
from saccade.engine.kernels.sdpa import Sdpa
from saccade.engine.kernels.tiled import Tiled
from saccade.engine.kernels.varlen import Varlen
from saccade.engine.positions.row_permutation import FEWEST, Reordered, reordered
from saccade.engine.samples import are_mapped, of_all_samples
from saccade.engine.validation import autocast, check_value
from saccade.support.errors import unsupported, value_error
from saccade.support.torch_modes import any_autocast, has_values, is_autocast, without_autocast

__all__ = ["KERNELS", "Route", "check_dropout", "finished", "output", "product", "route_of"]

_COMPILERS = ("torch._dynamo", "torch._inductor", "triton")
_TILED = Tiled()
KERNELS: tuple[Kernel, ...] = (Native(), Fused(), Sdpa(), Varlen(), Flex(), _TILED, Reference())
"""In the order in which they are asked. The tiled kernel runs everything, so that the definition runs by name only."""


class Route(NamedTuple):
    """How a product runs.

    Attributes:
        kernel: the fastest that is exact for the inputs, or the one asked for.
        passed_over: kernels that were asked before it, and every reason why they cannot run these inputs.
        reordered: the ingredients with their rows in the order that suits mask and kernel; None as they are.
    """

    kernel: Kernel
    passed_over: dict[str, tuple[str, ...]]
    reordered: Reordered | None


def route_of(
    inputs: AttentionInputs, dropout_p: float, impl: str | Kernel, *, needs_lse: bool = False, by_hand: bool = False
) -> Route:
    """How a product will run.

    Args:
        inputs, dropout_p, impl: of the product.
        needs_lse: whether somebody reads the lse; a sink does.
        by_hand: whether only those kernels are asked that compute gradients themselves.

    Raises:
        ValueError: an unknown name.
        UnsupportedError: the kernel asked for cannot run the inputs; every reason is listed.
    """
    needs_lse = needs_lse or inputs.sink_logit is not None
    if impl == "auto":
        kernel, passed_over = _fastest(inputs, dropout_p, needs_lse=needs_lse, by_hand=by_hand)
    else:
        kernel, passed_over = _named(inputs, impl), {}
        reasons = _reasons(kernel, inputs, dropout_p, needs_lse)
        if reasons:
            what, hint = f'impl="{kernel.name}"', 'impl="auto" finds a kernel that can'
            raise unsupported(what, reasons, hint=hint)
    return Route(kernel, passed_over, reordered(inputs, kernel, dropout_p) if inputs.shape[2] >= FEWEST else None)


def _fastest(
    inputs: AttentionInputs, dropout_p: float, *, needs_lse: bool, by_hand: bool
) -> tuple[Kernel, dict[str, tuple[str, ...]]]:
    """Return the first kernel that can run and leaves the inputs to no other, and why not those before it."""
    passed_over: dict[str, tuple[str, ...]] = {}
    left: Kernel | None = None  # with drawbacks, until the kernel that is faster is known to run
    for kernel in KERNELS:
        if (kernel.is_choosy and not kernel.suits(inputs, dropout_p)) or (by_hand and not kernel.by_hand):
            continue
        drawbacks = kernel.drawbacks(inputs, dropout_p)
        is_left = bool(drawbacks and kernel.leaves_to)
        reasons = drawbacks if is_left else _reasons(kernel, inputs, dropout_p, needs_lse) or drawbacks
        if not reasons:
            return kernel, passed_over
        passed_over[kernel.name] = reasons
        if left is not None and left.leaves_to == kernel.name:
            passed_over[left.name] = _reasons(left, inputs, dropout_p, needs_lse)
            if not passed_over[left.name]:
                del passed_over[left.name]
                return left, passed_over
            left = None
        left = kernel if is_left else left
    raise unsupported('impl="auto"', list(passed_over), hint='impl="reference" runs everything')


def _reasons(kernel: Kernel, inputs: AttentionInputs, dropout_p: float, needs_lse: bool) -> tuple[str, ...]:
    """Every reason why a kernel cannot run; empty if it can."""
    reasons = kernel.reasons(inputs, dropout_p)
    if needs_lse:
        reasons += kernel.reasons_of_lse(inputs)
    return reasons or kernel_check.reasons(kernel, inputs)


def _named(inputs: AttentionInputs, impl: str | Kernel) -> Kernel:
    if isinstance(impl, Kernel):
        return impl
    found = [kernel for kernel in KERNELS if kernel.name == impl]
    if found:
        return found[0]
    names = ", ".join(repr(name) for name in ("auto", *(kernel.name for kernel in KERNELS)))
    raise value_error("impl", f"be one of {names}", repr(impl))


def product(
    inputs: AttentionInputs, value: Tensor, dropout_p: float = 0.0, impl: str | Kernel = "auto", seed: int | None = None
) -> tuple[Tensor, Tensor]:
    """Output, in the dtype of the query, and lse.

    Args:
        inputs: the ingredients.
        value, dropout_p, impl, seed: as the user gave them; see `AttentionMatrix.matmul`.
    """
    out, lse = output(inputs, value, dropout_p, impl, seed, needs_lse=True)
    assert lse is not None  # a kernel that gives none has been passed over
    return out, lse


def output(
    inputs: AttentionInputs,
    value: Tensor,
    dropout_p: float = 0.0,
    impl: str | Kernel = "auto",
    seed: int | None = None,
    *,
    needs_lse: bool = False,
) -> tuple[Tensor, Tensor | None]:
    """The same where nobody reads the lse, which is None if the kernel gives none: torch's own has a faster one."""
    if any_autocast() and is_autocast(inputs.query):
        # Projections have been cast by now; scores and softmax are computed in float32 or wider, always.
        value = autocast(value, inputs.dtype)
        with without_autocast(inputs.device):
            return output(inputs, value, dropout_p, impl, seed, needs_lse=needs_lse)
    check_value(value, inputs.query, inputs.key, inputs.dtype)
    if type(dropout_p) is not float or dropout_p != 0.0 or seed is not None:
        check_dropout(dropout_p, seed)
    if value.dtype != inputs.query.dtype:  # prepared in float32, since scores are computed in float32 or wider
        value = value.to(inputs.query.dtype)
    inputs = inputs.current() if inputs.is_live else inputs
    inputs.plan  # noqa: B018  made here, to be kept for the backward pass
    dropped = None
    if dropout_p and has_values(inputs.query):
        drawn = dropout.draw() if seed is None else None
        dropped = Dropped(dropout_p, cast("int", seed)) if drawn is None else Dropped.of(dropout_p, drawn)
        if drawn is not None and dropped.levels:  # samples that share all inputs have results of their own, too
            inputs = inputs.replaced(query=inputs.query + torch.zeros_like(drawn).to(inputs.query))
    found = None
    while found is None:  # a kernel that is seen to err is not asked again
        found = _tried(inputs, value, dropped, route_of(inputs, dropout_p, impl, needs_lse=needs_lse))
    out, lse = found
    if lse is None:
        return out if out.dtype == inputs.dtype else out.to(inputs.dtype), None
    if inputs.sink_logit is None and out.dtype == inputs.dtype:
        return out, lse
    return finished(inputs, out, lse)


def _tried(
    inputs: AttentionInputs, value: Tensor, dropped: Dropped | None, route: Route
) -> tuple[Tensor, Tensor | None] | None:
    """Output and lse; None where the kernel errs, which is then known of it."""
    kernel, _, order = route
    own = inputs if order is None else order.inputs
    if not has_values(inputs.query):
        if autograd.is_recorded(inputs, value):
            return autograd.differentiable(_TILED, inputs, value, None)
        return autograd.results_like(inputs, value)
    if not kernel_check.holds(kernel, inputs, value, own):
        return None
    try:
        out, lse = _run(kernel, own, value, dropped)
    except Exception as error:
        # What else is raised here may be meant for others: checkpoints stop a run this way.
        if not kernel.is_checked or not type(error).__module__.startswith(_COMPILERS) or not kernel_check.is_on(inputs):
            raise
        kernel_check.failed(kernel, inputs, value, own, error)
        return None
    return (out, lse) if order is None or lse is None else order.restored(out, lse)


def _run(
    kernel: Kernel, inputs: AttentionInputs, value: Tensor, dropped: Dropped | None
) -> tuple[Tensor, Tensor | None]:
    if not kernel.hides or kernel.reasons_of_lse(inputs):
        found = nonfinite.forward_if_clean(kernel, inputs, value)
        if found is not None:
            return found if kernel.has_second_derivatives else autograd.differentiable_again(inputs, value, *found)
        kernel = _TILED
    if kernel.by_hand and autograd.is_recorded(inputs, value):
        return autograd.differentiable(kernel, inputs, value, dropped)
    if not kernel.by_hand and are_mapped(inputs, value):
        if dropped is not None:
            reason = "it is run once for all samples, and its dropout does not tell them apart"
            raise unsupported("vmap", [reason], hint='impl="auto" has dropout under vmap')
        out, lse = of_all_samples(inputs, partial(nonfinite.forward, kernel), value)
        return out, lse
    return nonfinite.forward(kernel, inputs, value, dropped)


def check_dropout(dropout_p: float, seed: int | None) -> None:
    """Raise unless both are what a product takes."""
    dropout.check(dropout_p)
    dropout.check_seed(seed)


def finished(inputs: AttentionInputs, out: Tensor, lse: Tensor) -> tuple[Tensor, Tensor]:
    """A kernel's results with the sink's share, in the dtype of the query."""
    if inputs.sink_logit is not None:
        out, lse = with_sink(out, lse, inputs.sink_logit)
    return (out if out.dtype == inputs.dtype else out.to(inputs.dtype)), lse
