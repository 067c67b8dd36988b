"""Checks of kernel calls. They use only torch, because their source is copied into counter-example scripts."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor


def definition(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    mask: Tensor,
    *,
    bias: Tensor | None = None,
    scale: float | None = None,
    softcap: float | None = None,
    sink_logit: Tensor | None = None,
) -> Tensor:
    """Compute attention by definition, row by row in float64, using only the keys that the row may attend to."""
    times = query.shape[1] // key.shape[1]
    scale = query.shape[3] ** -0.5 if scale is None else scale
    bias = None if bias is None else bias.double().expand(mask.shape)
    rows = []
    for b, h, i in torch.cartesian_prod(*(torch.arange(size) for size in query.shape[:3])).tolist():
        seen = mask[b, h, i].nonzero()[:, 0]
        scores = key[b, h // times, seen].double() @ query[b, h, i].double() * scale
        scores = scores if softcap is None else softcap * torch.tanh(scores / softcap)
        scores = scores if bias is None else scores + bias[b, h, i, seen]
        if sink_logit is not None:
            scores = torch.cat([scores, sink_logit[h : h + 1].double()])
        weights = scores.softmax(0)[: len(seen)]
        rows.append(weights @ value[b, h // times, seen].double())
    whole = torch.stack(rows) if rows else value.new_empty(0, value.shape[3], dtype=torch.float64)
    return whole.reshape(*query.shape[:3], value.shape[3])


def difference(name: str, got: Tensor, want: Tensor, limit: float) -> str:
    """Return a sentence if two tensors differ by more than rounding, in an entry, a row or as a whole; otherwise ""."""
    if got.shape != want.shape:
        return f"{name} has shape {list(got.shape)}, not {list(want.shape)}"
    if not want.numel():
        return ""
    got, want = got.detach(), want.detach()
    same = (got.double() == want.double()) | (got.isnan() & want.isnan())
    apart = torch.where(same, 0.0, (got.double() - want.double()).abs()).nan_to_num(torch.inf, torch.inf)
    size = torch.where(want.isfinite(), want, 0.0).double()
    typical = size.norm(dim=-1).square().mean().sqrt()
    errors = {"of the largest entry": apart.max() / size.abs().max().clamp_min(1.0)}
    if float(typical):
        errors["of a row"] = (apart.norm(dim=-1) / size.norm(dim=-1).clamp_min(typical)).max() / 4
        errors["of the whole"] = apart.norm() / size.norm()
    worst = max(errors, key=lambda each: float(errors[each]))
    if float(errors[worst]) <= limit:
        return ""
    at = [int(x) for x in torch.unravel_index(apart.argmax(), apart.shape)]
    numbers = f"{got[tuple(at)].item():.6g}, expected {want[tuple(at)].item():.6g}"
    return f"{name} at {at} is {numbers}; off by {float(errors[worst]):.1e} {worst}, allowed {limit:.0e}"


def faults(
    call: Callable[..., Tensor], right: Callable[..., Tensor], calls: list[dict[str, Any]], limits: tuple[float, float]
) -> list[str]:
    """Repeat calls, and return sentences on wrong results. Calls with inputs of equal shapes reuse the same memory."""
    found, memory, results = [], dict[tuple[Any, ...], Tensor](), list[tuple[Tensor, Tensor]]()
    for number, told in enumerate(calls, 1):
        upstream = told.get("upstream")
        inputs = {name: x for name, x in told.items() if name != "upstream"}
        for name, x in inputs.items():
            if isinstance(x, Tensor):
                place = (name, x.shape, x.stride(), x.dtype, x.requires_grad)
                same = memory.setdefault(place, x)
                if same is not x and 0 not in x.stride():
                    same.data.copy_(x.detach())
                    inputs[name] = same
        before = {name: x.detach().clone() for name, x in inputs.items() if isinstance(x, Tensor)}
        try:
            out = call(**inputs)
            lines = faults_of_result(out, call(**inputs), right(**inputs), inputs, before, upstream, limits)
        except Exception as error:  # a kernel may raise any error
            lines = [f"the call raises {type(error).__name__}: {' '.join(str(error).split())[:200]}"]
        else:
            if any(not torch.equal(now.nan_to_num(nan=0.0), kept) for now, kept in results):
                lines.append("the call changes the result of an earlier one")
            results.append((out.detach(), out.detach().nan_to_num(nan=0.0)))
        found += [f"call {number}: {line}" for line in lines if line]
    return found


def faults_of_result(
    out: Tensor,
    again: Tensor,
    want: Tensor,
    inputs: dict[str, Any],
    before: dict[str, Tensor],
    upstream: Tensor | None,
    limits: tuple[float, float],
) -> list[str]:
    """Return sentences on what is wrong with an output, with its gradients, and with the inputs after the call."""
    lines = [difference("the output", out, want, limits[0])]
    if out.dtype != inputs["query"].dtype:
        lines.append(f"the output is {out.dtype}, not {inputs['query'].dtype}")
    if not torch.equal(out.nan_to_num(nan=0.0), again.nan_to_num(nan=0.0)):
        lines.append("a second call returns a different output")
    for name, x in before.items():
        if not torch.equal(inputs[name].detach().nan_to_num(nan=0.0), x.nan_to_num(nan=0.0)):
            lines.append(f"the call changes its {name}")
        elif out.numel() and inputs[name].untyped_storage().data_ptr() == out.untyped_storage().data_ptr():
            lines.append(f"the output shares memory with the {name}")
    leaves = {name: x for name, x in inputs.items() if isinstance(x, Tensor) and x.requires_grad}
    if not leaves or upstream is None:
        return lines
    if not out.requires_grad:
        return [*lines, "the output has no gradient"]
    tensors = list(leaves.values())
    got = torch.autograd.grad(out, tensors, upstream, allow_unused=True, materialize_grads=True)
    true = torch.autograd.grad(want, tensors, upstream.double(), allow_unused=True, materialize_grads=True)
    pairs = zip(leaves, got, true, strict=True)
    return lines + [difference(f"the gradient of {name}", ours, theirs, limits[1]) for name, ours, theirs in pairs]
