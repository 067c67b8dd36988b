"""How much faster is a window of ±256 at 8,192 tokens than SDPA with a dense mask, and than FlexAttention?"""

import functools
import statistics
import time
from collections.abc import Callable, Iterator
from typing import NamedTuple

import torch
from torch import Tensor
from torch._inductor.utils import fresh_cache
from torch.nn import functional as F
from torch.nn.attention.flex_attention import create_block_mask, flex_attention

import saccade as sc
from benchmarks.checking import assert_agree
from benchmarks.measuring import Call, Referee, compare, matmul_rate, seconds
from benchmarks.memory import Job, extra_bytes
from benchmarks.reporting import Row, duration, ratio_row, share
from saccade import masks

N, HEADS, DIM, WIDTH = 8192, 8, 64, 256
TITLE = f"window ±{WIDTH}, n={N}, {HEADS} heads of {DIM}"
TARGETS = {
    torch.float32: {"sdpa": 8.0, "flex": 1.6, "both": 8.0},
    torch.bfloat16: {"sdpa": 6.0, "flex": 20.0},
}
MOST_MEMORY = 4.0  # of query + key + value

# Of FlexAttention's options only the block size of its mask reaches the CPU kernel. Of nine tried, these were fastest,
# by up to a third before the usual (128, 128); all are compiled, and the one that is fastest here is the peer.
FLEX_BLOCKS = ((64, 64), (64, 128))


class Case(NamedTuple):
    """Inputs of one dtype, and the mask in the form that each side takes."""

    tensors: list[Tensor]
    mask: masks.Mask
    dense: Tensor
    """Terms to add, 0 and -inf: SDPA would make them of a bool mask in every call."""
    grad: Tensor
    width: int

    def ours(self) -> Tensor:
        """One side."""
        return sc.attention(*self.tensors, self.mask)

    def sdpa(self) -> Tensor:
        """The other: SDPA with a dense mask."""
        return F.scaled_dot_product_attention(*self.tensors, attn_mask=self.dense)

    def gradients(self, forward: Callable[[], Tensor]) -> tuple[Tensor, ...]:
        """Forward and backward."""
        return torch.autograd.grad(forward(), self.tensors, self.grad)


def case(dtype: torch.dtype, n: int = N, width: int = WIDTH) -> Case:
    """Random inputs, the same for every run."""
    torch.manual_seed(0)
    tensors = [torch.randn(1, HEADS, n, DIM).to(dtype).requires_grad_() for _ in range(3)]
    mask = masks.Window(width, width)
    dense = torch.zeros(1, 1, n, n, dtype=dtype).masked_fill_(~mask.to_dense(n), -torch.inf)
    return Case(tensors, mask, dense, torch.randn(1, HEADS, n, DIM).to(dtype), width)


def check(its: Case) -> None:
    """Outputs and gradients of ours and SDPA's agree."""
    assert_agree(its.ours(), its.sdpa())
    for own, other in zip(its.gradients(its.ours), its.gradients(its.sdpa), strict=True):
        assert_agree(own, other)


class Flex(NamedTuple):
    """FlexAttention on a case: the call, and what it took to get there."""

    call: Call
    block: tuple[int, int]
    mask_seconds: float
    compile_seconds: float


def flex(its: Case, block: tuple[int, int], *, compiled: bool = True) -> Flex:
    """FlexAttention, after it has agreed with ours; forward only, since it has no backward pass on CPUs."""
    n, width = its.tensors[0].shape[2], its.width

    def near(b: Tensor, h: Tensor, q: Tensor, kv: Tensor) -> Tensor:
        del b, h
        return (q - kv).abs() <= width

    start = time.perf_counter()
    block_mask = create_block_mask(near, None, None, n, n, device="cpu", BLOCK_SIZE=block)
    with_mask = time.perf_counter()
    torch.compiler.reset()  # or a second case would be compiled for sizes that are not known
    function = torch.compile(flex_attention) if compiled else flex_attention
    query, key, value = (x.detach() for x in its.tensors)
    call = functools.partial(function, query, key, value, block_mask=block_mask)
    # What an earlier run left on disk would hide what compiling takes.
    with torch.no_grad(), fresh_cache():
        theirs = call()
        ready = time.perf_counter()
        assert_agree(its.ours(), theirs)
    return Flex(call, block, with_mask - start, ready - with_mask)


def fastest_flex(its: Case) -> Flex:
    """FlexAttention with the block size that is fastest right now."""
    made = [flex(its, block) for block in FLEX_BLOCKS]
    return min(made, key=lambda its: statistics.median(seconds(its.call) for _ in range(3)))


def _forward(its: Case, name: str, referee: Referee) -> Iterator[Row]:
    dtype = its.grad.dtype
    targets = TARGETS[dtype]
    peak = max(matmul_rate(dtype) for _ in range(20))
    visible = its.mask.density(N) * N * N
    with torch.no_grad():
        pair = compare(its.ours, its.sdpa, rounds=7, referee=referee)
        note = share(4 * visible * HEADS * DIM, pair.ours, peak)
        yield ratio_row(f"{name}, forward", pair, peer="SDPA+mask", target=targets["sdpa"], note=note)
        peer = fastest_flex(its)
        pair = compare(its.ours, peer.call, rounds=9, referee=referee)
    note = f"blocks {peer.block[0]} x {peer.block[1]}, made in {duration(peer.mask_seconds)}, "
    note += f"compiled in {duration(peer.compile_seconds)}"
    row = ratio_row(f"{name}, forward", pair, peer="FlexAttention", target=targets["flex"], note=note)
    figures = {"flex_mask_s": peer.mask_seconds, "flex_compile_s": peer.compile_seconds, "flex_block": peer.block}
    yield row._replace(figures=row.figures | figures)


def _both(its: Case, name: str, referee: Referee) -> Iterator[Row]:
    ours, theirs = (functools.partial(its.gradients, side) for side in (its.ours, its.sdpa))
    pair = compare(ours, theirs, rounds=3, referee=referee)
    target = TARGETS[its.grad.dtype].get("both")
    yield ratio_row(f"{name}, forward + backward", pair, peer="SDPA+mask", target=target)


def memory_of(backward: bool, n: int = N) -> Call:
    """For `extra_bytes`: one product, its inputs made and the code once run."""
    mask = masks.Window(WIDTH, WIDTH)
    tensors = [torch.randn(1, HEADS, n, DIM, requires_grad=backward) for _ in range(3)]

    def run(tensors: list[Tensor]) -> object:
        out = sc.attention(*tensors, mask)
        if not backward:
            return out
        return torch.autograd.grad(out, tensors, torch.ones(()).expand_as(out))

    run([x.detach()[:, :, :1024].requires_grad_(backward) for x in tensors])
    return functools.partial(run, tensors)


def _memory() -> Iterator[Row]:
    inputs = 3 * HEADS * N * DIM * 4
    names = ("forward", "forward + backward")
    extras = extra_bytes([Job("benchmarks.window:memory_of", [backward]) for backward in (False, True)])
    for name, extra in zip(names, extras, strict=True):
        yield Row(
            f"float32, {name}: memory",
            f"{extra / inputs:.2f} of the inputs' ({extra / 2**20:.0f} MiB)",
            f"below {MOST_MEMORY:g}",
            extra < MOST_MEMORY * inputs,
            {"extra_bytes": extra, "input_bytes": inputs},
        )


def measure(referee: Referee) -> Iterator[Row]:
    """Rows of this question."""
    for dtype in TARGETS:
        its = case(dtype)
        check(its)
        name = str(dtype).removeprefix("torch.")
        yield from _forward(its, name, referee)
        yield from _both(its, name, referee)
    yield from _memory()
