"""Numbers at real sizes: every row of outputs and gradients of every kernel against float64."""

from __future__ import annotations

import math
import os
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple
from unittest.mock import patch

import torch
from torch import Tensor

import saccade as sc
from benchmarks.gpu_check.definition import LIMITS, Problem, Truth, truth, worst
from benchmarks.gpu_check.finding import Finding
from benchmarks.gpu_check.steps import Context
from saccade import masks, testing
from saccade.positions import ALiBi, Clipped

__all__ = ["KERNELS", "SIZES", "VARIANTS", "measure"]

KERNELS = ("sdpa", "varlen", "tiled", "flex")
"""The kernels in the order of their runs. Only the last needs a compiler, which takes seconds for each mask."""
_RUNS = {"sdpa": ("full", "causal"), "varlen": ("full", "causal", "window", "documents")}
"""Variants that a kernel must run; the others run all. It may refuse the rest."""
_REACH, _SOFTCAP = 64, 20.0
_EVERY = (63, 64, 65, 127, 128, 129, 192, 704, 8191)


class Sizes(NamedTuple):
    """Sizes to try: lengths, widths, heads of queries and keys; fewer for flex, which compiles each."""

    lengths: tuple[int, ...]
    widths: tuple[int, ...]
    heads: tuple[int, int]
    compiled_lengths: tuple[int, ...]
    compiled_widths: tuple[int, ...]


SIZES = {
    "cuda": Sizes(_EVERY, (64, 128, 256), (32, 8), (704, 8191, 129), (64, 128)),
    "cpu": Sizes((63, 64, 65, 127, 128, 129, 192, 704), (64, 128), (4, 2), (192, 129), (64,)),
    "quick": Sizes((64, 129), (64,), (2, 1), (64,), (64,)),
}


class Variant(NamedTuple):
    """A mask, the same mask as a comparison of indices, and options."""

    mask: Callable[[int], masks.Mask | None]
    allowed: Callable[[int], Callable[[Tensor, Tensor], Tensor]]
    option: str = ""


def _documents(length: int) -> list[int]:
    return [length // 3, 1, length - length // 3 - 1]


def _same_document(length: int) -> Callable[[Tensor, Tensor], Tensor]:
    first, second, _ = _documents(length)

    def number(index: Tensor) -> Tensor:
        return (index >= first).long() + (index >= first + second).long()

    return lambda q, kv: (number(q) == number(kv)) & (kv <= q)


def _past(length: int) -> Callable[[Tensor, Tensor], Tensor]:
    return lambda q, kv: kv <= q


VARIANTS = {
    "full": Variant(lambda n: None, lambda n: lambda q, kv: (q >= 0) & (kv >= 0)),
    "causal": Variant(lambda n: masks.Causal(), _past),
    "window": Variant(lambda n: masks.sliding_window(100), lambda n: lambda q, kv: (kv <= q) & (q - kv < 100)),
    "documents": Variant(lambda n: masks.Documents(_documents(n), rule=masks.Causal()), _same_document),
    "sinks": Variant(lambda n: masks.Causal(), _past, "sink"),
    "softcap": Variant(lambda n: masks.Causal(), _past, "softcap"),
    "ALiBi": Variant(lambda n: masks.Causal(), _past, "slopes"),
    "trained bias": Variant(lambda n: masks.Causal(), _past, "bias"),
}


def measure(context: Context) -> Iterator[Finding]:
    """Yield one finding for each kernel, variant, dtype and width: the worst error over all lengths."""
    errors: dict[str, list[float]] = {}
    for kernel, name, width, lengths, dtype in _plan(SIZES[context.level]):
        if context.left() < 0.0:
            yield Finding(f"{kernel}: {name}, width {width}", "not measured: no time was left")
            break
        if kernel == "flex":
            torch.compiler.reset()  # every kind of mask and length is a graph, and there is room for 64
        finding = _finding(context, kernel, name, width, lengths, dtype)
        errors.setdefault(kernel, []).extend(finding.figures.values())
        yield finding
    for kernel, found in errors.items():
        text = f"right in {len(found)} variants" + (f", errors up to {max(found):.1g}" if found else "")
        yield Finding(kernel, text, headline=True)


def _plan(sizes: Sizes) -> Iterator[tuple[str, str, int, tuple[int, ...], torch.dtype]]:
    """Yield kernel, variant, width, lengths and dtype; what compiles comes last, one length after the other."""
    for kernel in KERNELS[:-1]:
        for width in sizes.widths:
            yield from ((kernel, name, width, sizes.lengths, torch.bfloat16) for name in VARIANTS)
    for kernel in ("sdpa", "tiled"):
        yield from ((kernel, name, sizes.widths[0], sizes.lengths[-3:], torch.float32) for name in VARIANTS)
    for width in sizes.compiled_widths:
        for length in sizes.compiled_lengths:
            yield from (("flex", name, width, (length,), torch.bfloat16) for name in VARIANTS)


def _finding(
    context: Context, kernel: str, name: str, width: int, lengths: tuple[int, ...], dtype: torch.dtype
) -> Finding:
    """Return how a kernel does at some lengths."""
    title = f"{kernel}: {name}, width {width}, {str(dtype).removeprefix('torch.')}"
    faults, errors, reasons = [], [], ""
    for length in lengths:
        try:
            error, where = _error(context, kernel, name, length, width, dtype)
        except sc.UnsupportedError as refusal:
            reasons = "; ".join(refusal.reasons)
            continue
        except Exception as error_:  # whatever a compiler or a driver raises is a finding, and names the kernel
            faults.append(f"length {length} raised {type(error_).__name__}: {' '.join(str(error_).split())[:150]}")
            context.device.synchronize()  # raises if the device is lost, and with it every later result
            continue
        errors.append(error)
        if error > LIMITS[dtype]:
            told = f"off by {error:.1g} of its size" if error < math.inf else "not finite"
            faults.append(f"length {length}: {where} {told}")
    if faults:
        return Finding(title, f"{'; '.join(faults)}; rounding is at most {LIMITS[dtype]:g}", False)
    if not errors:
        must_run = name in _RUNS.get(kernel, tuple(VARIANTS))
        return Finding(title, f"refused: {reasons}", False if must_run else None)
    most = max(errors)
    text = f"{len(errors)} of {len(lengths)} lengths, every row: errors up to {most:.1g}, rounding {LIMITS[dtype]:g}"
    return Finding(title, text, True, {"error": most})


def _error(context: Context, kernel: str, name: str, length: int, width: int, dtype: torch.dtype) -> tuple[float, str]:
    """Return the largest error of a kernel, of any quantity, and where it is; also of the check of first use."""
    device, (heads, kv_heads) = context.device.name, SIZES[context.level].heads
    variant = VARIANTS[name]
    its = _problem(variant, length, width, (heads, kv_heads), dtype, device)
    leaves = [x.requires_grad_() for x in (its.query, its.key, its.value)]
    options, parameters = _options(its, heads)
    arguments = (*leaves, variant.mask(length))
    with patch.dict(
        os.environ, {"SACCADE_FIRST_USE": "off"}
    ):  # it would put another kernel in the place of a wrong one
        found = _run(kernel, arguments, options, parameters, its.grad)
    is_looked_at = length == SIZES[context.level].compiled_lengths[0]
    right: Truth = truth(its)
    errors = {quantity: worst(x, quantity, right) for quantity, x in found.items()}
    if is_looked_at and its.sink is None:
        checked = testing.first_use(kernel, *arguments, **options)
        if max(error for error, _ in errors.values()) <= LIMITS[dtype] and not checked.ok:
            raise AssertionError(f"first_use accuses it, and every row is right: {checked.fault}")
    quantity = max(errors, key=lambda one: errors[one][0])
    return errors[quantity][0], f"{quantity} at {errors[quantity][1]}"


def _run(
    kernel: str, arguments: tuple[Any, ...], options: dict[str, Any], parameters: dict[str, Tensor], grad: Tensor
) -> dict[str, Tensor]:
    """Return output, lse and gradients by name; `sdpa` gives no lse."""
    lse = None
    if kernel in ("tiled", "flex"):
        out, lse = sc.attention_with_lse(*arguments, impl=kernel, **options)
    else:
        out = sc.attention(*arguments, impl=kernel, **options)
    leaves = {"query": arguments[0], "key": arguments[1], "value": arguments[2], **parameters}
    grads = torch.autograd.grad(out, list(leaves.values()), grad)
    found = {"output": out} | {f"gradient of {name}": x for name, x in zip(leaves, grads, strict=True)}
    if kernel == "varlen":
        with torch.no_grad():  # its lse has no gradient
            lse = sc.attention_with_lse(*arguments, impl=kernel, **options)[1]
    return found if lse is None else found | {"lse": lse}


def _problem(
    variant: Variant, length: int, width: int, heads: tuple[int, int], dtype: torch.dtype, device: str
) -> Problem:
    drawn = torch.Generator(device).manual_seed(length * width)  # on the device: there are up to 10⁸ numbers

    def normal(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=drawn, device=device)

    tensors = [normal(1, count, length, width).to(dtype) for count in (heads[0], heads[1], heads[1], heads[0])]
    made = {
        "sink": lambda: normal(heads[0]),
        "bias": lambda: normal(heads[0], 2 * _REACH + 1),
        "slopes": lambda: torch.exp2(-8.0 * torch.arange(1, heads[0] + 1) / heads[0]).to(device),
        "softcap": lambda: _SOFTCAP,
    }
    extra = {variant.option: made[variant.option]()} if variant.option else {}
    return Problem(*tensors, variant.allowed(length), **extra)


def _options(its: Problem, heads: int) -> tuple[dict[str, Any], dict[str, Tensor]]:
    """Return the options of `saccade.attention`, and the parameters that are trained, by name."""
    if its.sink is not None:
        sink = its.sink.requires_grad_()
        return {"sink_logit": sink}, {"sink": sink}
    if its.softcap is not None:
        return {"softcap": its.softcap}, {}
    if its.slopes is not None:
        return {"bias": ALiBi(heads).to(its.query.device)}, {}
    if its.bias is not None:
        bias = Clipped(heads, _REACH).to(its.query.device)
        bias.weight.data.copy_(its.bias)
        return {"bias": bias}, {"bias": bias.weight}
    return {}, {}
