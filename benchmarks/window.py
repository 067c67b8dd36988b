"""How much faster than SDPA with a dense mask is a window of ±256 at 8,192 tokens, and in how much memory?"""

import torch
from torch.nn import functional as F

import saccade as sc
from benchmarks.measuring import Pair, compare, extra_bytes, undisturbed
from saccade import masks

N, HEADS, DIM, WIDTH = 8192, 8, 64, 256
TARGETS = {"forward": 6.0, "backward": 6.0, "memory": 4.0}

_MEMORY = f"""
import torch, saccade as sc
from saccade import masks
mask = masks.Window({WIDTH}, {WIDTH})
q, k, v = (torch.randn(1, {HEADS}, {N}, {DIM}, requires_grad=BACKWARD) for _ in range(3))
small = [x.detach()[:, :, :1024].requires_grad_() for x in (q, k, v)]
sc.attention(*small, mask).sum().backward()
def run():
    out = sc.attention(q, k, v, mask)
    if BACKWARD:
        out.backward(torch.ones(()).expand_as(out))
    return out
"""


def _sides(dtype: torch.dtype) -> tuple[list[torch.Tensor], masks.Mask, torch.Tensor]:
    torch.manual_seed(0)
    tensors = [torch.randn(1, HEADS, N, DIM).to(dtype).requires_grad_() for _ in range(3)]
    mask = masks.Window(WIDTH, WIDTH)
    return tensors, mask, mask.to_dense(N)


def _check(tensors: list[torch.Tensor], mask: masks.Mask, dense: torch.Tensor) -> None:
    """Correctness first: outputs and gradients of both sides agree."""
    error = 1e-5 if tensors[0].dtype == torch.float32 else 3e-2
    grad = torch.randn_like(tensors[0])
    ours = sc.attention(*tensors, mask)
    theirs = F.scaled_dot_product_attention(*tensors, attn_mask=dense)
    torch.testing.assert_close(ours, theirs, rtol=error, atol=error)
    sides = [torch.autograd.grad(out, tensors, grad) for out in (ours, theirs)]
    for own, other in zip(*sides, strict=True):
        torch.testing.assert_close(own, other, rtol=error, atol=error)


def _backward(tensors: list[torch.Tensor], mask: masks.Mask, dense: torch.Tensor) -> Pair:
    grad = torch.randn_like(tensors[0])
    ours = sc.attention(*tensors, mask)
    theirs = F.scaled_dot_product_attention(*tensors, attn_mask=dense)

    def run(out: torch.Tensor) -> None:
        torch.autograd.grad(out, tensors, grad, retain_graph=True)

    return compare(lambda: run(ours), lambda: run(theirs), runs=5)


def _forward(tensors: list[torch.Tensor], mask: masks.Mask, dense: torch.Tensor) -> Pair:
    with torch.no_grad():
        return compare(
            lambda: sc.attention(*tensors, mask),
            lambda: F.scaled_dot_product_attention(*tensors, attn_mask=dense),
            runs=7,
        )


def main(peak: float) -> list[tuple[str, str, str, bool]]:
    """Rows of (question, measured, target, met)."""
    rows = []
    for dtype in (torch.float32, torch.bfloat16):
        name = str(dtype).removeprefix("torch.")
        tensors, mask, dense = _sides(dtype)
        _check(tensors, mask, dense)
        for question, measure in (("forward", _forward), ("backward", _backward)):
            pair, quiet = undisturbed(lambda m=measure, t=tensors, a=mask, d=dense: m(t, a, d), peak=peak)
            text = f"{pair.ratio:.1f}x  ({1e3 * pair.ours:.1f} ms, SDPA+mask {1e3 * pair.theirs:.1f} ms)"
            wanted = TARGETS[question] if dtype == torch.float32 else 1.0
            rows.append(
                (
                    f"window ±{WIDTH}, n={N}, {name}, {question}",
                    text + ("" if quiet else "  [disturbed]"),
                    f"at least {wanted:g}x",
                    pair.ratio >= wanted,
                )
            )
    inputs = 3 * HEADS * N * DIM * 4
    for question, backward in (("forward", False), ("forward + backward", True)):
        extra = extra_bytes(_MEMORY.replace("BACKWARD", str(backward)))
        rows.append(
            (
                f"window ±{WIDTH}, n={N}, float32, {question}: extra memory",
                f"{extra / inputs:.2f} of query+key+value  ({extra / 2**20:.0f} MiB)",
                f"below {TARGETS['memory']:g}",
                extra < TARGETS["memory"] * inputs,
            )
        )
    return rows
