"""Native: the compiled kernel for CPUs from saccade-cpu, with one parallel region per forward or backward pass."""

from __future__ import annotations

import os
import platform
from functools import cache, lru_cache
from importlib import import_module
from typing import Any

import torch
from torch import Tensor

from saccade.engine.bias.decay_sums import DecayTerm
from saccade.engine.bias.relative import DistanceTerm
from saccade.engine.bias.term import DenseTerm, MaskedTerm, Term, summed_to
from saccade.engine.dropout import Dropped
from saccade.engine.inputs import AttentionInputs
from saccade.engine.kernels import aten_flash
from saccade.engine.kernels.kernel import (
    CAN_RUN,
    NO_FORWARD_DERIVATIVES,
    Backward,
    KernelWithBackward,
    Request,
    Tensors,
    Verdict,
    reasons_unless_dot_product,
)
from saccade.engine.kernels.native_arguments import (
    Call,
    bytes_of_backward,
    cached_plan,
    chunks_of,
    cost_of,
    known_plan,
    prepared,
)
from saccade.engine.memory_accounting import Cost
from saccade.support.language import Message
from saccade.support.torch_modes import has_forward_derivatives, unobserved, wants_gradient

_FEW_KEYS = {torch.float32: 40, torch.bfloat16: 8}  # with fewer, or fewer pairs over all heads, others start faster
_FEW_PAIRS = {torch.float32: 8192, torch.bfloat16: 1024}
_FEW_ROWS = {torch.bfloat16: 128, torch.float16: 8}  # with fewer queries per key, converting keys takes longer
_FEW_BIASED_ROWS = 4  # the same with a bias, which other kernels add more slowly
_MANY_PRODUCTS, _MANY_BITS = 1 << 28, 1 << 25
"""Sizes above which strided masks run faster on gathered keys: number of multiplications per head in float32, and
number of pairs in bfloat16, where multiplication is cheap."""
HALF = 1 if platform.machine() in ("aarch64", "arm64") else 3
"""Lowest level (see `abilities`) of processors that multiply bfloat16."""


_NOT_INSTALLED = "saccade-cpu is not installed: pip install 'saccade-attention[cpu]'"


def _load() -> tuple[Any, str]:
    """Import the compiled kernel's package. Return it and "", or None and the reason why it cannot be imported."""
    try:
        return import_module("saccade_cpu"), ""
    except ImportError:
        return None, _NOT_INSTALLED
    except OSError as error:  # for example, Debian's build of torch gives its libraries other names
        return None, f"saccade-cpu is installed, but its library cannot be loaded: {error.__cause__ or error}"


@cache
def abilities() -> int | None:
    """Return the instruction level of the compiled kernel; None if it is not installed or cannot be loaded.

    Levels on x86-64: 0 plain, 1 AVX2, 2 AVX-512, 3 AVX-512 with bfloat16, 4 AMX. On ARM: 0 NEON, 1 NEON with bfloat16.
    """
    library, _ = _load()
    if library is None:
        return None
    with unobserved():
        return int(library.abilities())


@cache
def is_on() -> bool:
    """Return whether the compiled kernel was loaded and is not disabled by ``SACCADE_CPU=off``."""
    return os.environ.get("SACCADE_CPU", "on") != "off" and abilities() is not None


def reads(dtype: torch.dtype) -> bool:
    """Return whether the compiled kernel can multiply tensors of this dtype on this processor."""
    return dtype is torch.float32 or (dtype is torch.bfloat16 and (abilities() or 0) >= HALF)


def read_dtype(dtype: torch.dtype) -> torch.dtype:
    """Return the dtype in which the compiled kernel reads tensors: ``dtype`` if supported, float32 if not."""
    return dtype if reads(dtype) else torch.float32


@cache
def _missing() -> Verdict:
    """Return the verdict for a compiled kernel that is not installed or cannot be loaded."""
    return Verdict((_load()[1] or _NOT_INSTALLED,))


_OFF = Verdict(("SACCADE_CPU=off disables it",))
_STEPS = Verdict((), ("its mask is strided, and it would also compute the pairs in between",))


class Native(KernelWithBackward):
    """Exact attention in compiled code, which processes a few rows at a time with all of their visible keys.

    Inputs in float16 are converted to float32, and so are those in bfloat16 if the processor cannot multiply bfloat16.

    Cost: time grows with the number of allowed pairs, even with dropout, softcaps and biases. Beyond inputs and
    outputs, memory is needed for packed keys and values for each thread, and for float32 copies of converted inputs.
    """

    name = "native"
    defers_to = "fused"

    def verdict(self, inputs: AttentionInputs, request: Request) -> Verdict:
        """Return why the compiled kernel does not support these inputs, or why `fused` is faster.

        With few keys, other kernels start faster. For a strided mask, the compiled kernel reads all keys and one bit
        per pair, whereas `fused` gathers only the keys that the stride selects. Other kernels are also faster for
        half-precision inputs that must be converted, if torch multiplies their dtype fast, or if few queries share a
        key and no gradients are needed.
        """
        if request.impl == "auto":
            if not is_on():
                return _missing() if abilities() is None else _OFF
            (batch, heads, q_len, kv_len), dtype = inputs.shape, inputs.query.dtype
            read = dtype if dtype is torch.float32 else read_dtype(dtype)  # each call counts
            pairs, enough = batch * heads * q_len * kv_len, _FEW_PAIRS[read]
            if dtype is torch.float64:
                pass  # refused below
            elif kv_len < _FEW_KEYS[read]:
                return _verdict_of_few_keys(kv_len, _FEW_KEYS[read])
            elif pairs < enough:
                return Verdict((), (f"{pairs:,} pairs are too few to repay packing keys ({enough:,} are needed)",))
            elif request.dropout_p == 0.0 and _should_gather(inputs, read):
                return _STEPS
            elif read is not dtype and (reason := _reason_against_conversion(inputs)):
                return Verdict((), (reason,))
        return _missing() if abilities() is None else _verdict_of_inputs(inputs)

    def cost(self, inputs: AttentionInputs, value_dim: int, dropout_p: float) -> Cost:
        """Return the cost of the compiled kernel's forward pass, without running it."""
        return cost_of(inputs, value_dim, dropout_p, read_dtype(inputs.query.dtype))

    def backward_bytes(self, inputs: AttentionInputs, value_dim: int) -> int:
        """Return the peak memory of the compiled kernel's backward pass, in bytes: gradients, partial sums, copies."""
        return bytes_of_backward(inputs, value_dim, read_dtype(inputs.query.dtype))

    def pairs(self, inputs: AttentionInputs) -> int:
        """Return the number of query-key pairs whose scores the compiled kernel computes."""
        return known_plan(inputs).pairs(inputs)

    def forward(self, inputs: AttentionInputs, value: Tensor, dropped: Dropped | None) -> tuple[Tensor, Tensor]:
        """Run the compiled kernel and return its output and lse."""
        dtype = value.dtype if value.dtype is torch.float32 else read_dtype(value.dtype)  # each call counts
        call = Call.of(inputs, value, dropped, dtype)
        out, lse = torch.ops.saccade_cpu.forward(*call.arguments)
        out = out if out.shape[3] == value.shape[3] else out[..., : value.shape[3]]
        if call.of_rows is not None:
            lse = (lse + call.of_rows).to(lse.dtype)
        if isinstance(inputs.bias, MaskedTerm):
            out = out.masked_fill(inputs.bias.queries[..., None], 0.0)
            lse = lse.masked_fill(inputs.bias.queries, -torch.inf)
        return (out if out.dtype is value.dtype else out.to(value.dtype)), lse

    def backward(
        self,
        inputs: AttentionInputs,
        value: Tensor,
        dropped: Dropped | None,
        results: Backward,
        wanted: tuple[bool, ...],
    ) -> Tensors:
        """Compute the gradients of query, key, value and the source of the bias with the compiled kernel."""
        dtype = read_dtype(inputs.query.dtype)
        call, grad_out = Call.of(inputs, value, dropped, dtype), prepared(results.grad_out, dtype)
        delta = (grad_out[..., : value.shape[3]].float() * results.out.float()).sum(-1)
        if results.grad_lse is not None:
            delta = delta - results.grad_lse
        table = call.table if wanted[3] else -1
        lse = results.lse if call.of_rows is None else (results.lse - call.of_rows).to(results.lse.dtype)
        lse = lse.contiguous()
        of_query, of_key, of_value, of_bias = torch.ops.saccade_cpu.backward(
            *call.arguments, grad_out, lse, delta.contiguous(), chunks_of(inputs), table
        )
        width = inputs.query.shape[3]
        bias = None
        if wanted[3] and inputs.bias is not None:
            bias = _grad_of_bias(inputs.bias, of_bias, call, results.grad_lse)
        others = (None,) * (len(wanted) - 4)
        return (
            of_query[..., :width],
            of_key.sum(0)[..., :width],
            of_value.sum(0)[..., : value.shape[3]],
            bias,
            *others,
        )


def _verdict_of_inputs(inputs: AttentionInputs) -> Verdict:
    """Return the compiled kernel's verdict on the inputs, without regard to whether other kernels are faster."""
    query, why = inputs.query, []
    if not query.is_cpu:
        why.append(f"it runs on CPUs, not on {query.device.type}")
    if query.dtype is torch.float64:
        why.append(Message("it has no {dtype}", dtype="float64"))
    if inputs.tile_function is not None or inputs.modification is not None:
        why += reasons_unless_dot_product(inputs)
    if inputs.rule.calls_functions:
        why.append("its mask calls a function")
    if inputs.bias is not None:
        why += _reasons_of_bias(inputs.bias, inputs.shape)
    if has_forward_derivatives():
        why.append(NO_FORWARD_DERIVATIVES)
    if not why and cached_plan(inputs) is None:
        why.append("the bounds of its mask are inexact, and one bit for each pair would take too much memory")
    return Verdict(tuple(why)) if why else CAN_RUN


@lru_cache
def _verdict_of_few_keys(count: int, least: int) -> Verdict:
    return Verdict((), (f"{count} keys are too few to repay packing them ({least} are needed)",))


def _reason_against_conversion(inputs: AttentionInputs) -> str | None:
    """Return why another kernel is faster than converting half-precision inputs to float32; None if no kernel is."""
    (_, heads, q_len, _), dtype = inputs.shape, inputs.query.dtype
    if not aten_flash.multiplies_slowly(dtype):
        return f"torch multiplies {str(dtype).removeprefix('torch.')} on this processor, and it would need float32"
    rows, few = q_len * heads // inputs.key.shape[1], _FEW_ROWS[dtype] if inputs.bias is None else _FEW_BIASED_ROWS
    if rows >= few or any(map(wants_gradient, inputs.leaves)):  # gradients need many products
        return None
    return f"{rows} queries per key are too few to repay converting keys to float32"


def _should_gather(inputs: AttentionInputs, dtype: torch.dtype) -> bool:
    """Return whether the mask is strided and has enough pairs that `fused` is faster than the compiled kernel."""
    bits, width = inputs.shape[2] * inputs.shape[3], inputs.query.shape[3]
    is_half = dtype is torch.bfloat16
    # `fused` materialises the bias of each tile, so that gathering keys pays off only for more pairs.
    is_few = bits < _MANY_BITS if is_half else bits * width < _MANY_PRODUCTS * (1 if inputs.bias is None else 2)
    return not is_few and any(step != 1 for step, _ in inputs.rule.terms())


def _reasons_of_bias(bias: Term, shape: tuple[int, int, int, int]) -> list[str]:
    """Return why the compiled kernel cannot read a bias, or cannot compute the gradient of the bias."""
    if isinstance(bias, MaskedTerm):
        return [] if bias.term is None else _reasons_of_bias(bias.term, shape)
    source, wants_grad = bias.source, wants_gradient(bias.source)
    if isinstance(bias, DistanceTerm | DecayTerm):
        reason, fits = "it reads decays as float32 sums, which are inexact if they span a range of more than 128", False
        if isinstance(bias, DecayTerm):
            fits = bias.has_narrow_range()
        else:
            reason = "it reads biases by distance only if positions are consecutive and all queries share the bias"
            fits = bias.q_addresses is None and source.shape[2] == 1
        return [] if fits else [reason]
    if not isinstance(bias, DenseTerm):
        return [f"it cannot read a {type(bias).__name__}"]
    if source.shape[3] == 1 < shape[3]:
        return ["it reads a bias along the keys, and this one has a single column"]
    if wants_grad and source.shape[2] > 1 and source.shape[:2] != shape[:2]:
        return ["it has no gradient for a dense bias that batch items or heads share"]
    return []


def _grad_of_bias(bias: Term, grad: Tensor, call: Call, grad_lse: Tensor | None) -> Tensor:
    """Convert the compiled kernel's gradient of a bias to the gradient of the source tensor of the bias.

    A constant that is added to a full row changes only the lse, so the gradient of the constant is that of the lse.
    """
    if not grad.numel() or not bias.source.numel():  # there are no pairs
        return torch.zeros_like(bias.source)
    bias = bias.term if isinstance(bias, MaskedTerm) and bias.term is not None else bias
    if call.table:
        grad = grad.sum(0)[:, :, None]
    if isinstance(bias, DecayTerm):
        return bias.of_gradients(grad, grad_lse)
    grad = summed_to(grad, bias.source)
    if call.places is None:
        return grad
    return torch.zeros(bias.source.shape, dtype=grad.dtype).index_add_(3, call.places, grad)
