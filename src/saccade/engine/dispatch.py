"""Run ``A @ value``: choose a kernel, reorder the rows if that saves work, run the kernel, and contain NaN and inf.

`choose_kernel` serves both `attend` and `AttentionMatrix.explain`, so `explain` reports what will run.
"""

from __future__ import annotations

from functools import partial
from typing import cast

import torch
from torch import Tensor

from saccade.engine import autograd, dropout, first_use_check, nonfinite
from saccade.engine.bias.sink_logit import with_sink
from saccade.engine.check_inputs import autocast, check_value
from saccade.engine.dropout import Dropped
from saccade.engine.inputs import AttentionInputs
from saccade.engine.kernels.flex import Flex
from saccade.engine.kernels.fused import Fused
from saccade.engine.kernels.kernel import Kernel, Request, Verdict
from saccade.engine.kernels.matmul import Matmul
from saccade.engine.kernels.native import Native
from saccade.engine.kernels.reference import Reference
from saccade.engine.kernels.sdpa import Sdpa
from saccade.engine.kernels.tiled import Tiled
from saccade.engine.kernels.varlen import Varlen
from saccade.engine.positions.row_permutation import FEWEST, reordered
from saccade.engine.vmap import are_mapped, of_all_samples
from saccade.support.errors import torchscript_unsupported, unsupported, value_error
from saccade.support.torch_modes import any_autocast, has_values, is_autocast, without_autocast

_COMPILERS = ("torch._dynamo", "torch._inductor", "triton")
DEFAULT = Request()
_TILED = Tiled()
KERNELS: tuple[Kernel, ...] = (Native(), Matmul(), Fused(), Sdpa(), Varlen(), Flex(), _TILED, Reference())
"""All kernels, in the order in which "auto" tries them. The tiled kernel supports nearly all inputs, so "auto" rarely
reaches the reference kernel."""


def choose_kernel(inputs: AttentionInputs, request: Request = DEFAULT) -> Kernel:
    """Return the kernel that will run ``A @ value``: the requested one, or the fastest that is exact for the inputs.

    Raises:
        ValueError: the kernel's name is unknown.
        UnsupportedError: the requested kernel does not support the inputs; every reason is listed.
    """
    if inputs.sink_logit is not None and not request.needs_lse:
        request = request._replace(needs_lse=True)
    kernel = None
    if request.impl != "auto":
        kernel = _requested(inputs, request)
    else:
        deferring: Kernel | None = None  # defers to a faster kernel, which may be unable to run the inputs
        for candidate in KERNELS:
            if request.needs_backward and not candidate.has_backward:
                continue
            verdict = candidate.verdict(inputs, request)
            if candidate.is_checked and not verdict.cannot:
                verdict = _verdict(candidate, inputs, request)
            if not (verdict.cannot or verdict.should_skip):
                kernel = candidate
                break
            if deferring is not None and deferring.defers_to == candidate.name:
                if not _verdict(deferring, inputs, request._replace(impl=deferring.name)).cannot:
                    kernel = deferring
                    break
                deferring = None
            if verdict.should_skip and not verdict.cannot and candidate.defers_to:
                deferring = candidate
        if kernel is None:
            names = [candidate.name for candidate in KERNELS]
            raise unsupported('impl="auto"', names, hint='impl="reference" runs everything')
    return kernel


def reasons_to_skip(inputs: AttentionInputs, request: Request, kernel: Kernel) -> dict[str, tuple[str, ...]]:
    """Return why ``impl="auto"`` skips each kernel other than ``kernel``; empty if ``kernel`` was requested by name."""
    skipped: dict[str, tuple[str, ...]] = {}
    if request.impl != "auto":
        return skipped
    if inputs.sink_logit is not None:
        request = request._replace(needs_lse=True)
    for other in KERNELS:
        if other is kernel:
            continue
        verdict = _verdict(other, inputs, request)
        reasons = verdict.cannot or verdict.should_skip
        if not verdict.cannot and verdict.should_skip and other.defers_to not in ("", kernel.name):
            reasons = _verdict(other, inputs, request._replace(impl=other.name)).cannot or reasons
        skipped[other.name] = reasons or (f"it could run these inputs; {kernel.name} is faster",)
    return skipped


def _verdict(kernel: Kernel, inputs: AttentionInputs, request: Request) -> Verdict:
    """Return a kernel's verdict on the inputs, which rejects a kernel that failed its first-use check."""
    verdict = kernel.verdict(inputs, request)
    if verdict.cannot or not kernel.is_checked:
        return verdict
    return verdict._replace(cannot=first_use_check.reasons(kernel, inputs))


def _requested(inputs: AttentionInputs, request: Request) -> Kernel:
    """Return the kernel that ``impl`` names, or raise an error if it does not support the inputs."""
    impl = request.impl
    matches = [impl] if isinstance(impl, Kernel) else [kernel for kernel in KERNELS if kernel.name == impl]
    if not matches:
        names = ", ".join(repr(name) for name in ("auto", *(kernel.name for kernel in KERNELS)))
        raise value_error("impl", f"be one of {names}", repr(impl))
    reasons = _verdict(matches[0], inputs, request).cannot
    if reasons:
        hint = 'impl="auto" finds a kernel that can'
        raise unsupported(f'impl="{matches[0].name}"', reasons, hint=hint)
    return matches[0]


def attend_with_lse(inputs: AttentionInputs, value: Tensor, request: Request = DEFAULT) -> tuple[Tensor, Tensor]:
    """Compute the attention output, in the dtype of the query, and the lse.

    Args:
        inputs: the checked inputs.
        value: the values, not checked yet; see `AttentionMatrix.matmul`.
        request: the options of the product, not checked yet.
    """
    out, lse = attend(inputs, value, request._replace(needs_lse=True))
    assert lse is not None  # kernels without an lse are skipped
    return out, lse


def attend(inputs: AttentionInputs, value: Tensor, request: Request = DEFAULT) -> tuple[Tensor, Tensor | None]:
    """Compute the attention output and the lse, which may be None unless ``request.needs_lse`` is set.

    Some kernels are faster if they do not have to return the lse.
    """
    if any_autocast() and is_autocast(inputs.query):
        # Projections have been cast by now. Scores and softmax are always computed in float32 or wider.
        value = autocast(value, inputs.dtype)
        with without_autocast(inputs.device):
            return attend(inputs, value, request)
    if torch._C._is_tracing():
        raise torchscript_unsupported()
    check_value(value, inputs.query, inputs.key, inputs.dtype)
    dropout_p, _, seed, _, _ = request
    if type(dropout_p) is not float or dropout_p != 0.0 or seed is not None:
        dropout.check(dropout_p, seed)
    if value.dtype != inputs.query.dtype:  # the score prepared query and key in float32
        value = value.to(inputs.query.dtype)
    inputs = inputs.current() if inputs.is_live else inputs
    inputs.plan  # noqa: B018  computed here, to be cached for the backward pass
    dropped = None
    if dropout_p and has_values(inputs.query):
        drawn = dropout.draw() if seed is None else None
        dropped = Dropped(dropout_p, cast("int", seed)) if drawn is None else Dropped.of(dropout_p, drawn)
        if drawn is not None and dropped.levels:  # samples with the same inputs may still drop different weights
            inputs = inputs.replaced(query=inputs.query + torch.zeros_like(drawn).to(inputs.query))
    result = None
    while result is None:  # a kernel that failed its check is excluded from the next choice
        result = _run(inputs, value, dropped, choose_kernel(inputs, request))
    out, lse = result
    if lse is None:
        return out if out.dtype == inputs.dtype else out.to(inputs.dtype), None
    if inputs.sink_logit is None and out.dtype == inputs.dtype:
        return out, lse
    return postprocessed(inputs, out, lse)


def _run(
    inputs: AttentionInputs, value: Tensor, dropped: Dropped | None, kernel: Kernel
) -> tuple[Tensor, Tensor | None] | None:
    """Run a kernel and return its output and lse. If it fails its first-use check, record that and return None."""
    if not has_values(inputs.query):
        if autograd.is_recorded(inputs, value):
            return autograd.differentiable(_TILED, inputs, value, None)
        return autograd.empty_results(inputs, value)
    order = None
    if inputs.shape[2] >= FEWEST:
        order = reordered(inputs, kernel, 0.0 if dropped is None else dropped.p)
    local = inputs if order is None else order.inputs
    if kernel.is_checked and not first_use_check.holds(kernel, inputs, value, local):
        return None
    results: tuple[Tensor, Tensor | None] | None = None
    try:
        runner = kernel
        if not kernel.supports_masked_rows:
            runner, results = _TILED, _run_if_finite(kernel, local, value)
        if results is None:
            if not runner.has_backward:
                results = _run_by_autograd(runner, local, value, dropped)
            elif autograd.is_recorded(local, value):
                results = autograd.differentiable(runner, local, value, dropped)
            else:
                results = nonfinite.forward(runner, local, value, dropped)
    except Exception as error:
        # Re-raise anything else: torch.utils.checkpoint stops a forward pass with an exception.
        if (
            not kernel.is_checked
            or not type(error).__module__.startswith(_COMPILERS)
            or not first_use_check.is_on(inputs)
        ):
            raise
        first_use_check.failed(kernel, inputs, value, local, error)
        return None
    out, lse = results
    return results if order is None or lse is None else order.restored(out, lse)


def _run_if_finite(kernel: Kernel, inputs: AttentionInputs, value: Tensor) -> tuple[Tensor, Tensor | None] | None:
    """Run a kernel that cannot mask individual rows. Return None if NaN or inf could spread."""
    results = nonfinite.forward_if_clean(kernel, inputs, value)
    if results is None or kernel.has_second_derivatives:
        return results
    return autograd.twice_differentiable(inputs, value, *results)


def _run_by_autograd(
    kernel: Kernel, inputs: AttentionInputs, value: Tensor, dropped: Dropped | None
) -> tuple[Tensor, Tensor]:
    """Run a kernel that autograd differentiates. Under `vmap`, run it once for all samples."""
    if not are_mapped(inputs, value):
        return nonfinite.forward(kernel, inputs, value, dropped)
    if dropped is not None:
        reason = "it runs once for all samples, so they would share one dropout mask"
        raise unsupported("vmap", [reason], hint='impl="auto" has dropout under vmap')
    out, lse = of_all_samples(inputs, partial(nonfinite.forward, kernel), value)
    return out, lse


def postprocessed(inputs: AttentionInputs, out: Tensor, lse: Tensor) -> tuple[Tensor, Tensor]:
    """Finish a kernel's output and lse: add the sink, and convert the output to the dtype of the query."""
    if inputs.sink_logit is not None:
        out, lse = with_sink(out, lse, inputs.sink_logit)
    return (out if out.dtype == inputs.dtype else out.to(inputs.dtype)), lse
