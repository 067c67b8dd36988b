"""The sides of a race: functions of saccade, torch and other packages that compute a problem or say why not."""

import functools
import statistics
import time
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch._inductor.utils import fresh_cache
from torch.nn import functional as F
from torch.nn.attention.flex_attention import create_block_mask, flex_attention

import saccade as sc
from benchmarks.conditions import no_wheel
from benchmarks.measuring import seconds
from benchmarks.peers.peer import imported
from benchmarks.problem import Problem
from benchmarks.reporting import duration
from saccade.masks import Causal, Coarse, Window

# The CPU kernel of FlexAttention reads no option but the block size. Of nine tried, these two were fastest, by up to a
# third over the usual (128, 128). Both are compiled, and the faster one is the peer.
FLEX_BLOCKS = ((64, 64), (64, 128))


class UnfitError(Exception):
    """Error of a peer that cannot compute the problem; the message says why."""


class Side(NamedTuple):
    """A side of a race: a way to compute a problem.

    Attributes:
        forward: from a probability of dropout to the output.
        is_same: whether it computes the problem with its mask; SDPA without a mask does not, and shows its rate.
        note: how long it took to prepare.
    """

    forward: Callable[[float], Tensor]
    is_same: bool = True
    note: str = ""


def ours(its: Problem, impl: Any = "auto") -> Side:
    """Return this library."""
    return Side(lambda p: sc.attention(*its.tensors, its.mask, dropout_p=p, impl=impl))


def without_wheel(its: Problem) -> Side:
    """Return this library without saccade-cpu."""

    def forward(dropout_p: float) -> Tensor:
        with no_wheel():
            return sc.attention(*its.tensors, its.mask, dropout_p=dropout_p)

    return Side(forward)


def sdpa(its: Problem) -> Side:
    """Return SDPA without a mask, or with its causal flag."""
    is_causal = its.mask == Causal()
    call = functools.partial(F.scaled_dot_product_attention, is_causal=is_causal, enable_gqa=its.is_grouped)
    return Side(lambda p: call(*its.tensors, dropout_p=p), is_same=is_causal or its.mask is None)


def sdpa_with_mask(its: Problem) -> Side:
    """Return SDPA with the mask as a tensor."""
    if its.mask is None:
        raise UnfitError("there is no mask")
    call = functools.partial(F.scaled_dot_product_attention, attn_mask=its.terms, enable_gqa=its.is_grouped)
    return Side(lambda p: call(*its.tensors, dropout_p=p))


def flex(its: Problem) -> Side:
    """Return compiled FlexAttention with the block size that is fastest now."""
    if its.backward:
        raise UnfitError("FlexAttention has no backward pass on CPUs")
    if its.dropout_p:
        raise UnfitError("FlexAttention has no dropout")
    made = [flex_with(its, block) for block in FLEX_BLOCKS]
    return min(made, key=lambda side: statistics.median(seconds(lambda: side.forward(0.0)) for _ in range(3)))


def flex_with(its: Problem, block: tuple[int, int], *, compiled: bool = True) -> Side:
    """Return FlexAttention with one block size."""
    mask, start, block_mask = its.mask, time.perf_counter(), None
    if mask is not None:

        def allows(b: Tensor, h: Tensor, q: Tensor, kv: Tensor) -> Tensor:
            return mask.allows(b, h, q, kv)

        sizes = (size if size > 1 else None for size in mask.shape[:2])
        block_mask = create_block_mask(allows, *sizes, its.n, its.n, device="cpu", BLOCK_SIZE=block)
    with_mask = time.perf_counter()
    torch.compiler.reset()  # or a second problem would be compiled for sizes that are not known
    function = torch.compile(flex_attention) if compiled else flex_attention
    call = functools.partial(function, *its.tensors, block_mask=block_mask, enable_gqa=its.is_grouped)
    try:
        with torch.no_grad(), fresh_cache():  # what an earlier run left on disk would hide what compiling takes
            call()
    except Exception as error:  # whatever its compiler raises
        raise UnfitError(f"does not compile: {str(error).strip().splitlines()[0]}") from error
    note = f"blocks {block[0]} x {block[1]}, made in {duration(with_mask - start)}, "
    return Side(lambda _: call(), note=note + f"compiled in {duration(time.perf_counter() - with_mask)}")


def local_attention(its: Problem) -> Side:
    """Return local-attention without rotary positions: a window, or blocks that see their neighbours."""
    match its.mask:
        case Window(left=int(size), right=right) if right in (0, size):
            exact = True
        case Coarse(rule=Window(left=1, right=1), block_size=size):
            exact, right = False, size
        case _:
            raise UnfitError("local-attention has Window(w, w), Window(w, 0) and Coarse(Window(1, 1), w)")
    if its.is_grouped or its.n % size:
        raise UnfitError("local-attention has no grouped heads, and lengths that its window divides")
    module: Any = _imported("local_attention").LocalAttention(
        size, causal=right == 0, exact_windowsize=exact, use_rotary_pos_emb=False
    )

    def forward(dropout_p: float) -> Tensor:
        module.dropout.p = dropout_p
        return module(*its.tensors)

    return Side(forward)


def x_transformers(its: Problem) -> Side:
    """Return the flash form of the attention of x-transformers."""
    if its.is_grouped:
        raise UnfitError("x-transformers groups heads in another order")
    causal = its.mask == Causal()
    module: Any = _imported("x_transformers.attend").Attend(flash=True, causal=causal)
    allowed = None if causal else its.allowed

    def forward(dropout_p: float) -> Tensor:
        module.dropout = dropout_p
        return module(*its.tensors, mask=allowed)[0]

    return Side(forward)


def _imported(name: str) -> Any:
    try:
        return imported(name)
    except ImportError as error:
        raise UnfitError(str(error)) from error


SIDES: dict[str, Callable[[Problem], Side]] = {
    "ours": ours,
    "no-wheel": without_wheel,
    "sdpa": sdpa,
    "sdpa+mask": sdpa_with_mask,
    "flex": flex,
    "local-attention": local_attention,
    "x-transformers": x_transformers,
    **{impl: functools.partial(ours, impl=impl) for impl in ("native", "fused", "tiled", "reference")},
}
"""The sides by their names on the command line."""
