"""Known bugs of torch: shown first without saccade, then through `testing.first_use`, which must flag them."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from functools import cache
from typing import Any

import torch
from torch import Tensor
from torch._dynamo import config
from torch.nn.attention import flex_attention as flex

import saccade as sc
from benchmarks.gpu_check.definition import LIMITS, Problem, truth, worst
from benchmarks.gpu_check.finding import Finding
from benchmarks.gpu_check.steps import Context
from saccade import masks, testing
from saccade.engine.kernels.flex import Flex
from saccade.testing import FirstUse

__all__ = ["measure"]

CUDNN, VARLEN, FLEX = "cuDNN gradient (#196678)", "varlen_attn padding (#176793)", "Flex past its recompile limit"
_TOKENS = {"cuda": (144, 288, 512), "cpu": (48, 80, 64), "quick": (20, 44, 16)}
_LENGTHS = {"cuda": 704, "cpu": 192, "quick": 64}


def measure(context: Context) -> Iterator[Finding]:
    """Yield three findings for each bug: of torch alone, of the check of first use, and of `saccade.attention`."""
    yield from _each(context, CUDNN, _cudnn_gradient)
    yield from _each(context, VARLEN, _varlen_padding)
    yield from _each(context, FLEX, _recompile_limit)


def _each(context: Context, name: str, canary: Callable[[Context], Iterator[Finding]]) -> Iterator[Finding]:
    try:
        yield from canary(context)
    except Exception as error:  # torch may refuse what it got wrong before: that is a result, not the end
        yield Finding(
            name, f"raised {type(error).__name__}: {' '.join(str(error).split())[:200]}", False, headline=True
        )
        context.device.synchronize()


def _flagged(name: str, shown: bool, found: FirstUse) -> Finding:
    """Judge the check of first use: it must flag what is wrong, and nothing else."""
    told = f"flagged: {found.fault}" if found.fault else "not flagged"
    return Finding(f"{name}: first_use", told, bool(found.fault) == shown, headline=True)


def _right(name: str, its: Problem, mask: masks.Mask) -> Finding:
    """Judge `saccade.attention` on the same tensors by the definition in float64."""
    leaves = [x.detach().requires_grad_() for x in (its.query, its.key, its.value)]
    out = sc.attention(*leaves, mask)
    grads = torch.autograd.grad(out, leaves, its.grad)
    right = truth(its)
    names = ("output", "gradient of query", "gradient of key", "gradient of value")
    errors = {name: worst(x, name, right) for name, x in zip(names, (out, *grads), strict=True)}
    quantity = max(errors, key=lambda one: errors[one][0])
    error, limit = errors[quantity][0], LIMITS[its.query.dtype]
    kernel = sc.AttentionMatrix(leaves[0], leaves[1], mask).explain().kernel
    text = f"{kernel}: {quantity} off by {error:.1g} of its size at {errors[quantity][1]}, rounding {limit:g}"
    return Finding(f"{name}: saccade.attention", text, error <= limit, {"error": error})


def _cudnn_gradient(context: Context) -> Iterator[Finding]:
    """NaN in the query's gradient where L % 128 == 64, a mask is passed, and a row's lse is below -88.7."""
    length, width, device = _LENGTHS[context.level], 64, context.device.name
    drawn = torch.Generator().manual_seed(0)
    query, key, value, grad = (torch.randn(1, 2, length, width, generator=drawn) for _ in range(4))
    query, key = 0.1 * query, 0.1 * key
    query[..., 0], key[..., 0] = 1.0, -120.0 * math.sqrt(width)  # every score is about -120
    tensors = [x.to(device, torch.bfloat16) for x in (query, key, value, grad)]
    its = Problem(*tensors, lambda q, kv: kv <= q)
    leaves = [x.clone().requires_grad_() for x in tensors[:3]]
    seen = torch.ones(length, length, dtype=torch.bool, device=device).tril()[None, None]
    out = context.device.cudnn(*leaves, seen)
    grads = torch.autograd.grad(out, leaves, tensors[3])
    bad = {name: int((~x.isfinite()).sum()) for name, x in zip(("query", "key", "value"), grads, strict=True)}
    shown = any(bad.values())
    told = ", ".join(f"{count} of {name}" for name, count in bad.items() if count)
    yield Finding(
        f"{CUDNN}: torch alone", f"shown, gradients not finite: {told}" if shown else "not shown", headline=True
    )
    yield _flagged(CUDNN, shown, testing.first_use(context.device.cudnn, *tensors[:3], masks.Causal()))
    yield _right(CUDNN, its, masks.Causal())


def _varlen_padding(context: Context) -> Iterator[Finding]:
    """Gradients that nobody writes, of tokens after the last sequence."""
    sizes, width, padding, heads, device = _TOKENS[context.level], 64, 2, 16, context.device.name
    if context.level == "quick":
        heads = 2
    end = sum(sizes)
    ends = torch.tensor([0, *sizes], device=device).cumsum(0).to(torch.int32)
    drawn = torch.Generator().manual_seed(0)
    tensors = [
        torch.randn(1, heads, end + padding, width, generator=drawn).to(device, torch.bfloat16) for _ in range(4)
    ]

    def packed(query: Tensor, key: Tensor, value: Tensor, mask: object) -> Tensor:
        context.device.poison()
        flat = (x[0].transpose(0, 1).contiguous() for x in (query, key, value))
        return context.device.varlen(*flat, ends, max(sizes)).transpose(0, 1)[None]

    leaves = [x.clone().requires_grad_() for x in tensors[:3]]
    out = packed(*leaves, None)
    context.device.poison()
    grads = torch.autograd.grad(out[:, :, :end], leaves, tensors[3][:, :, :end])
    rows = {name: x[:, :, end:] for name, x in zip(("query", "key", "value"), grads, strict=True)}
    rows["output"] = out[:, :, end:]
    wrong = [name for name, x in rows.items() if bool((x != 0).any())]  # NaN is not 0 either
    yield Finding(
        f"{VARLEN}: torch alone",
        f"shown, rows past the last sequence are not 0: {', '.join(wrong)}" if wrong else "not shown",
        headline=True,
    )
    mask = masks.Documents([*sizes, padding], rule=masks.Causal()) & masks.Padding([end])
    yield _flagged(VARLEN, bool(wrong), testing.first_use(packed, *tensors[:3], mask, masks="objects"))
    rows_of = torch.repeat_interleave(torch.arange(len(sizes)), torch.tensor(sizes)).to(device)
    inside = Problem(*(x[:, :, :end] for x in tensors), lambda q, kv: (rows_of[q] == rows_of[kv]) & (kv <= q))
    yield _right(VARLEN, inside, masks.Documents(list(sizes), rule=masks.Causal()))


class _Limited(Flex):
    """Our Flex kernel where torch has compiled as many kinds of masks as it will."""

    def function(self) -> Any:
        return self.called

    def __init__(self, backend: str):
        def ours(*tensors: Any, **options: Any) -> Any:  # its graphs are counted apart from the user's
            return flex.flex_attention(*tensors, **options)

        compiled = torch.compile(ours, fullgraph=True, backend=backend)

        def called(*tensors: Any, **options: Any) -> Any:
            with config.patch(recompile_limit=1):
                return compiled(*tensors, **options)

        self.called = called


@cache
def _window(width: int) -> Callable[..., Tensor]:
    """Return a rule that torch compiles apart from those of other widths."""
    scope: dict[str, Any] = {}
    exec(f"def rule(b, h, q, kv): return (kv <= q) & (q - kv < {width})", scope)
    return scope["rule"]


def _recompile_limit(context: Context) -> Iterator[Finding]:
    """Past its limit, torch runs the definition and takes memory for every pair, with a warning at most."""
    length, device = {"cuda": 4096, "cpu": 256, "quick": 128}[context.level], context.device.name
    drawn = torch.Generator().manual_seed(0)
    tensors = [torch.randn(1, 2, length, 64, generator=drawn).to(device, torch.bfloat16) for _ in range(4)]
    compiled = torch.compile(flex.flex_attention, backend=context.device.compiler)
    bytes_of = []
    with config.patch(recompile_limit=1):
        for width in (7, 9):
            blocks = flex.create_block_mask(_window(width), None, None, length, length, device=device)
            call = lambda b=blocks: compiled(*tensors[:3], block_mask=b)  # noqa: E731
            call()
            bytes_of.append(context.device.peak_bytes(call))
    shown = bytes_of[1] >= 4 * length**2
    told = f"{bytes_of[0] / 2**20:.1f} MiB for the first mask, {bytes_of[1] / 2**20:.1f} MiB past the limit"
    yield Finding(f"{FLEX}: torch alone", f"{'' if shown else 'not '}shown, {told}", headline=True)
    kernel = _Limited(context.device.compiler)
    first = testing.first_use(kernel, *tensors[:3], masks.Causal(), gradients=False)
    second = testing.first_use(kernel, *tensors[:3], masks.sliding_window(9) | masks.Global([0]), gradients=False)
    yield Finding(f"{FLEX}: before it", str(first), first.ok)
    yield _flagged(FLEX, True, second)
    yield _right(FLEX, Problem(*tensors, lambda q, kv: kv <= q), masks.Causal())
