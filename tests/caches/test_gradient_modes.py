"""With gradients, without, in inference mode: whatever a cache was made in, it goes on in any other."""

import itertools
from collections.abc import Callable
from typing import NamedTuple

import pytest
import torch
from tests.caches import cache_kinds
from tests.sampled import sampled
from torch import Tensor

from saccade import masks, positions
from saccade.caches import (
    CompressiveCache,
    CrossCache,
    KVCache,
    LayerCache,
    RecurrentCache,
    SegmentCache,
    SinkWindowCache,
)
from saccade.mechanisms import CompressiveMemory, Linear, Mechanism, Performer, Softmax

CAUSAL = masks.Causal()
MODES = {"gradients": torch.enable_grad, "none": torch.no_grad, "inference": torch.inference_mode}
KINDS: dict[str, Callable[[], LayerCache]] = cache_kinds.KINDS | {
    "room": lambda: KVCache(30),
    # with room left when the mode first changes
    "window": lambda: SinkWindowCache(2, 9),
    "segments": lambda: SegmentCache(4, 7),
    "turned": lambda: SinkWindowCache(2, 9, rotary=positions.Rotary(4)),
    "sums": RecurrentCache,
    "remembered": CompressiveCache,
    "estimated": RecurrentCache,
    "trained": KVCache,
}
MECHANISMS: dict[str, Callable[[], Mechanism]] = {
    "sums": Linear,
    "remembered": lambda: CompressiveMemory(4, 3, update="delta").double().requires_grad_(False),
    "estimated": lambda: Performer(8),
    "trained": lambda: Softmax(sink_logit=4),
}
BETWEEN = ("crop", "reorder", "one item", "no tokens")
REFUSED = {
    ("heavy", "crop"),
    ("snap", "crop"),
    ("sums", "crop"),
    ("estimated", "crop"),
    ("remembered", "crop"),
    ("turned", "one item"),
}
EVERY_ORDER = list(itertools.product(MODES, repeat=3))
FEW_ORDERS = [
    (first, between, names[(i + j) % 3])
    for names in (list(MODES),)
    for i, first in enumerate(names)
    for j, between in enumerate(names)
]
"""Every mode before, between and after every other, but not all three orders of them."""


class Both(NamedTuple):
    """A cache that is called in one mode after the other, and one that never leaves that of gradients."""

    own: LayerCache
    other: LayerCache
    mechanism: Mechanism

    @classmethod
    def of(cls, kind: str) -> "Both":
        return cls(KINDS[kind](), KINDS[kind](), MECHANISMS.get(kind, Softmax)())

    def called(self, mode: str, q_len: int, where: Tensor | None = None) -> None:
        given = [torch.randn(2, heads, q_len, 4, dtype=torch.float64) for heads in (4, 2, 2)]
        leaves = [x.clone().requires_grad_() for x in given]
        expected = self.other.attend(self.mechanism, *leaves, mask=CAUSAL, positions=where)
        with MODES[mode]():
            mine = [x.clone().requires_grad_(mode == "gradients") for x in given]
            out = self.own.attend(self.mechanism, *mine, mask=CAUSAL, positions=where)
        torch.testing.assert_close(out, expected)
        if mode == "gradients":
            wanted = torch.autograd.grad(expected.sin().sum(), leaves)
            for x, grad in zip(torch.autograd.grad(out.sin().sum(), mine), wanted, strict=True):
                torch.testing.assert_close(x, grad)

    def changed(self, mode: str, what: str) -> None:
        if what == "no tokens":
            self.called(mode, 0, torch.empty(2, 0, dtype=torch.int64))
        elif what == "one item":  # from now on items stand at other places
            start = self.own.length
            self.called(mode, 1, torch.tensor([[start], [-1]]))
        else:
            for cache, in_mode in ((self.own, mode), (self.other, "gradients")):
                with MODES[in_mode]():
                    cache.reorder([1, 0]) if what == "reorder" else cache.crop(6)


@pytest.mark.ci
@pytest.mark.parametrize(
    "orders", [pytest.param(FEW_ORDERS, id="few"), pytest.param(EVERY_ORDER, id="every", marks=pytest.mark.slow)]
)
@pytest.mark.parametrize(
    "kind, what",
    sampled([pytest.param(*pair) for pair in itertools.product(KINDS, BETWEEN) if pair not in REFUSED], 3),
)
def test_a_cache_goes_on_in_any_order_of_modes(kind: str, what: str, orders: list[tuple[str, str, str]]) -> None:
    for modes in orders:
        both = Both.of(kind)
        both.called(modes[0], 7)
        both.changed(modes[1], what)
        for mode in (modes[2], *modes):
            both.called(mode, 1)
        both.called(modes[2], 3)


@pytest.mark.parametrize("first", MODES)
def test_a_context_that_was_read_in_one_mode_serves_in_the_others(first: str) -> None:
    cache, softmax = CrossCache(), Softmax()
    q, k, v = (torch.randn(2, heads, 5, 4, dtype=torch.float64) for heads in (4, 2, 2))
    with MODES[first]():
        cache.attend(softmax, q.clone(), k.clone(), v.clone())
    for mode in (*MODES, *MODES):
        with MODES[mode]():
            own = q.clone().requires_grad_(mode == "gradients")
            out = cache.attend(softmax, own)
        torch.testing.assert_close(out, softmax(q, k) @ v)
        if mode == "gradients":
            out.sum().backward()
            assert own.grad is not None
