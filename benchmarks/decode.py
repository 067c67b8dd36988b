"""Speed of a decode step with shared key heads beside SDPA's, and beside reading the same bytes once."""

from collections.abc import Iterator
from typing import NamedTuple
from unittest.mock import patch

import torch
from torch import Tensor
from torch.nn import functional as F

from benchmarks.checking import assert_agree
from benchmarks.conditions import lacking, no_wheel
from benchmarks.measuring import Call, Pair, Referee, compare
from benchmarks.reporting import Row, duration, ratio_row
from saccade import masks
from saccade.caches import KVCache, buffers
from saccade.mechanisms import Softmax

HEADS, KV_HEADS, DIM = 32, 8, 128
TARGETS = {torch.float32: {8192: 2.5, 32768: 2.3}, torch.bfloat16: {8192: 2.5, 32768: 1.7}}
ELSEWHERE = {torch.float32: 2.3, torch.bfloat16: 1.7}
"""Targets on processors for which there are no others."""
OF_SUM = 0.6
EXTRA = 150e-6
TITLE = f"decode, one token, {HEADS} query heads and {KV_HEADS} key heads of {DIM}"
TITLE_ZH = f"解码一个词元，{HEADS} 个查询头和 {KV_HEADS} 个键头，每头宽 {DIM}"
_CAUSAL, _SOFTMAX = masks.Causal(), Softmax()


class Case(NamedTuple):
    """A cache, the token to decode, and keys and values including that token: in the cache, and copied."""

    cache: KVCache
    token: tuple[Tensor, Tensor, Tensor]
    held: tuple[Tensor, Tensor]
    copied: tuple[Tensor, Tensor]

    @torch.inference_mode()
    def ours(self) -> Tensor:
        """Take a step, then undo it so that the next one has the same length."""
        out = self.cache.attend(_SOFTMAX, *self.token, mask=_CAUSAL)
        self.cache.crop(self.cache.length - 1)
        return out

    @torch.inference_mode()
    def theirs(self) -> Tensor:
        """Compute only the product over the content of our cache: SDPA has no cache."""
        return F.scaled_dot_product_attention(self.token[0], *self.held, enable_gqa=True)

    @torch.inference_mode()
    def theirs_apart(self) -> Tensor:
        """Do the same over ordinary tensors, so that neither side's data is in the processor's cache."""
        return F.scaled_dot_product_attention(self.token[0], *self.copied, enable_gqa=True)

    @torch.inference_mode()
    def summed(self) -> tuple[Tensor, Tensor]:
        """Read the same bytes once, a lower bound of the time of a step."""
        return self.held[0].sum(), self.held[1].sum()


def case(n: int, dtype: torch.dtype, heads: int = HEADS, kv_heads: int = KV_HEADS, dim: int = DIM) -> Case:
    """Return random inputs: n tokens in the cache, the last of which is the token to decode."""
    torch.manual_seed(0)
    query = torch.randn(1, heads, n, dim).to(dtype)
    key, value = (torch.randn(1, kv_heads, n, dim).to(dtype) for _ in range(2))
    cache = KVCache(n)
    past, last = (slice(0, n - 1), slice(n - 1, n))
    # The results of the prompt's own queries do not matter here, so that they see as little as possible.
    cache.attend(_SOFTMAX, query[:, :, past], key[:, :, past], value[:, :, past], mask=masks.Window(0, 0))
    token = (query[:, :, last].clone(), key[:, :, last].clone(), value[:, :, last].clone())
    cache.attend(_SOFTMAX, *token, mask=_CAUSAL)
    assert cache.key is not None
    assert cache.value is not None
    held = (cache.key, cache.value)
    cache.crop(n - 1)
    return Case(cache, token, held, (key, value))


def check(its: Case) -> None:
    """Check that both sides agree."""
    ours = its.ours()
    assert_agree(ours, its.theirs())
    assert_agree(ours, its.theirs_apart())


def _beside(its: Case, call: Call, referee: Referee) -> Pair:
    return compare(its.ours, call, rounds=20, referee=referee, batch=5, warm_up=3)


def measure(referee: Referee) -> Iterator[Row]:
    """Measure this question and return its rows."""
    for dtype, targets in TARGETS.items():
        for n, promised in targets.items():
            target = ELSEWHERE[dtype] if lacking(dtype) else promised
            name, its = f"{str(dtype).removeprefix('torch.')}, n={n}", case(n, dtype)
            check(its)
            pair = _beside(its, its.theirs, referee)
            yield ratio_row(name, pair, peer="SDPA(enable_gqa)", target=target)
            with no_wheel():
                check(its)
                pair = _beside(its, its.theirs, referee)
            yield ratio_row(f"{name}, without the wheel", pair, peer="SDPA(enable_gqa)", target=ELSEWHERE[dtype])
            pair = _beside(its, its.theirs_apart, referee)
            yield ratio_row(f"{name}, SDPA over a copy", pair, peer="SDPA(enable_gqa)")
            if dtype == torch.float32:
                with patch.object(buffers, "_ADVICE", None):
                    small = case(n, dtype)
                yield ratio_row(f"{name}, pages of 2 MB", _beside(its, small.ours, referee), peer="pages of 4 KB")
                pair = _beside(its, its.summed, referee)
                figures = {"ratio": pair.ratio, "ours_s": pair.ours, "theirs_s": pair.theirs}
                measured = f"{pair.ratio:.0%} of its rate: {duration(pair.ours)}, sum {duration(pair.theirs)}"
                rows = (f"{name}, beside a sum of the bytes", measured, f"at least {OF_SUM:.0%}")
                yield Row(*rows, pair.ratio >= OF_SUM, figures, pair.rate, pair.quiet)
    its = case(64, torch.float32, 4, 2, 16)
    check(its)
    pair = compare(its.ours, its.theirs, rounds=400, referee=referee, batch=100, warm_up=50)
    figures = {"ours_s": pair.ours, "theirs_s": pair.theirs}
    measured = f"{duration(pair.ours)}, SDPA {duration(pair.theirs)}"
    allowed = pair.theirs + EXTRA
    rows = ("64 tokens: what a step costs in Python", measured, f"at most {duration(allowed)}")
    yield Row(*rows, pair.ours <= allowed, figures, pair.rate, pair.quiet)
