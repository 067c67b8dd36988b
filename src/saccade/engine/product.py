"""The product ``A @ value``: choose a kernel, put the rows in order, run, and keep NaN where it may be seen.

`route_of` is read by `product` and by `AttentionMatrix.explain`: what is told is what runs.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from saccade.engine import autograd, dropout, guard
from saccade.engine.checks import autocast, check_value
from saccade.engine.dropout import Dropped
from saccade.engine.ingredients import Ingredients
from saccade.engine.kernels.flex import Flex
from saccade.engine.kernels.fused import Fused
from saccade.engine.kernels.kernel import Kernel
from saccade.engine.kernels.native import Native
from saccade.engine.kernels.reference import Reference
from saccade.engine.kernels.tiled import Tiled
from saccade.engine.row_order import FEWEST, Reordered, reordered
from saccade.engine.sink import with_sink
from saccade.errors import unsupported, value_error
from saccade.transforms import any_autocast, is_autocast

__all__ = ["KERNELS", "Route", "check_dropout", "finished", "product", "results_like", "route_of"]

KERNELS: tuple[Kernel, ...] = (Native(), Fused(), Tiled(), Flex(), Reference())
"""In the order in which they are asked. The tiled kernel runs everything, so that those after it run by name only: the
definition, and FlexAttention, until the laws have been seen to hold for it on a GPU."""


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


def route_of(given: Ingredients, dropout_p: float, impl: str | Kernel) -> Route:
    """How a product will run.

    Raises:
        ValueError: an unknown name.
        UnsupportedError: the kernel asked for cannot run the inputs; every reason is listed.
    """
    passed_over: dict[str, tuple[str, ...]] = {}
    for kernel in (impl,) if isinstance(impl, Kernel) else KERNELS:
        if not (
            impl in (kernel.name, kernel)
            or (impl == "auto" and (not kernel.is_choosy or kernel.suits(given, dropout_p)))
        ):
            continue
        reasons = kernel.reasons(given, dropout_p)
        if not reasons:
            order = reordered(given, kernel, dropout_p) if given.shape[2] >= FEWEST else None
            return Route(kernel, passed_over, order)
        if impl != "auto":
            what, hint = f'impl="{kernel.name}"', 'impl="auto" finds a kernel that can'
            raise unsupported(given.where, what, reasons, hint=hint)
        passed_over[kernel.name] = reasons
    names = ", ".join(repr(name) for name in ("auto", *(kernel.name for kernel in KERNELS)))
    raise value_error(given.where, "impl", f"be one of {names}", repr(impl))


def product(
    given: Ingredients, value: Tensor, dropout_p: float = 0.0, impl: str | Kernel = "auto", seed: int | None = None
) -> tuple[Tensor, Tensor]:
    """Output, in the dtype of the query, and lse.

    Args:
        given: the ingredients.
        value, dropout_p, impl, seed: as the user gave them; see `AttentionMatrix.matmul`.
    """
    if any_autocast() and is_autocast(given.query):
        # Projections have been cast by now; scores and softmax are computed in float32 or wider, always.
        value = autocast(value, given.dtype)
        with torch.autocast(given.device.type, enabled=False):
            return product(given, value, dropout_p, impl, seed)
    check_value(given.where, value, given.query, given.key, given.dtype)
    if type(dropout_p) is not float or dropout_p != 0.0 or seed is not None:
        check_dropout(given.where, dropout_p, seed)
    if value.dtype != given.query.dtype:  # prepared in float32, since scores are computed in float32 or wider
        value = value.to(given.query.dtype)
    given = given.current() if given.is_live else given
    given.plan  # noqa: B018  made here, to be kept for the backward pass
    kernel, _, order = route_of(given, dropout_p, impl)
    dropped = Dropped(dropout_p, dropout.draw_seed() if seed is None else seed) if dropout_p else None
    own = given if order is None else order.given
    if given.query.is_meta:
        out, lse = results_like(given, value)
    elif kernel.by_hand and autograd.is_recorded(own, value):
        out, lse = autograd.differentiable(kernel, own, value, dropped)
    else:
        out, lse = guard.forward(kernel, own, value, dropped)
    if order is not None:
        out, lse = order.restored(out, lse)
    if given.sink_logit is None and out.dtype == given.dtype:
        return out, lse
    return finished(given, out, lse)


def check_dropout(where: str, dropout_p: float, seed: int | None) -> None:
    """Raise unless both are what a product takes."""
    dropout.check(dropout_p, where)
    dropout.check_seed(seed, where)


def results_like(given: Ingredients, value: Tensor) -> tuple[Tensor, Tensor]:
    """Empty tensors of the results' shapes and dtypes."""
    out = value.new_empty(*given.shape[:3], value.shape[3])
    return out, out.new_empty(given.shape[:3], dtype=given.compute_dtype)


def finished(given: Ingredients, out: Tensor, lse: Tensor) -> tuple[Tensor, Tensor]:
    """A kernel's results with the sink's share, in the dtype of the query."""
    if given.sink_logit is not None:
        out, lse = with_sink(out, lse, given.sink_logit)
    return (out if out.dtype == given.dtype else out.to(given.dtype)), lse
