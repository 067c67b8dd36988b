"""Cases of scores, relative biases and sinks, alone and together."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

from saccade.positions import T5, ALiBi, Bias, Clipped, GridTable, ShawKeys
from saccade.scores import Additive, Bilinear, Cosine, Dot, Gaussian
from saccade.testing import shared_masks
from saccade.testing.case import Case, seeded

# Positions: sequences of different lengths, a cache with evicted keys, and any order.
RAGGED: dict[str, Any] = {
    "q_len": 3,
    "kv_len": 5,
    "q_positions": ((2, 3, 4), (0, 1, -1)),
    "kv_positions": ((0, 1, 2, 3, 4), (0, 1, -1, -1, -1)),
}
EVICTED: dict[str, Any] = {"q_len": 2, "kv_len": 6, "q_positions": (40, 41), "kv_positions": (0, 1, 37, 38, 40, 41)}
SHUFFLED: dict[str, Any] = {"q_len": 4, "kv_len": 6, "q_positions": (3, 0, 5, 2), "kv_positions": (4, 1, 0, 5, 3, 2)}

_SCORES = (
    Case("dot-unscaled", *shared_masks.CAUSAL, score=Dot(scaled=False)),
    Case("bilinear", *shared_masks.CAUSAL, score=seeded(lambda: Bilinear(8, 8))),
    Case("bilinear-widths-differ", *shared_masks.padding(4, 7), key_dim=5, score=seeded(lambda: Bilinear(8, 5))),
    Case("additive", *shared_masks.window(2, 1), score=seeded(lambda: Additive(8, 8, 5))),
    Case(
        "additive-widths-differ",
        *shared_masks.CAUSAL,
        key_dim=3,
        q_len=3,
        kv_len=9,
        num_kv_heads=1,
        score=seeded(lambda: Additive(8, 3, 4)),
    ),
    Case("cosine", *shared_masks.documents(3, 4), scale=10.0, score=Cosine()),
    Case("cosine-evicted-cache", *shared_masks.CAUSAL, score=Cosine(), **EVICTED),
    Case("gaussian", None, None, q_len=5, kv_len=9, score=seeded(lambda: Gaussian(trainable=True))),
    Case("gaussian-decode", *shared_masks.CAUSAL, q_len=1, kv_len=9, score=Gaussian(2.0)),
    Case("gaussian-empty-rows", *shared_masks.window(1, 1), q_len=9, kv_len=4, score=Gaussian(0.7)),
)


def _relative(name: str, build: Callable[[], Bias], **options: Any) -> Iterator[Case]:
    """Return cases of one relative bias at many kinds of positions."""
    bias = seeded(build)
    yield Case(name, *shared_masks.window(2, 3), relative=bias, **options)
    yield Case(f"{name}-extend", None, None, q_len=3, kv_len=9, relative=bias, **options)
    yield Case(f"{name}-decode", *shared_masks.CAUSAL, q_len=1, kv_len=9, relative=bias, **options)
    yield Case(f"{name}-ragged", *shared_masks.CAUSAL, relative=bias, **RAGGED | options)


_RELATIVE = (
    *_relative("alibi", lambda: ALiBi(4)),
    *_relative("clipped", lambda: Clipped(4, 2)),
    *_relative("t5", lambda: T5(4, num_buckets=8, max_distance=6), scale=1.0),
    *_relative("shaw-keys", lambda: ShawKeys(8, 2)),
    *_relative("grid-table", lambda: GridTable(4, 2, 5)),
    Case("alibi-six-heads", *shared_masks.CAUSAL, num_heads=6, relative=ALiBi(6)),
    Case("alibi-evicted-cache", *shared_masks.CAUSAL, relative=ALiBi(4), **EVICTED),
    Case(
        "t5-decoder",
        *shared_masks.CAUSAL,
        q_len=4,
        kv_len=11,
        scale=1.0,
        relative=seeded(lambda: T5(4, num_buckets=6, max_distance=9, bidirectional=False)),
    ),
    Case("clipped-strided", *shared_masks.strided(3), q_len=8, kv_len=11, relative=seeded(lambda: Clipped(4, 4))),
    Case("shaw-keys-predicate", *shared_masks.MIXED, relative=seeded(lambda: ShawKeys(8, 1))),
    Case("shaw-keys-shuffled", *shared_masks.window(2, 2), relative=seeded(lambda: ShawKeys(8, 3)), **SHUFFLED),
    Case("shaw-keys-past-only", *shared_masks.CAUSAL, relative=seeded(lambda: ShawKeys(8, (3, 0)))),
    Case("shaw-keys-of-heads", *shared_masks.CAUSAL, relative=seeded(lambda: ShawKeys(8, (3, 0), num_heads=4))),
    Case("shaw-keys-two-reaches", *shared_masks.window(4, 4), relative=seeded(lambda: ShawKeys(8, (1, 3)))),
    Case("clipped-more-queries", None, None, q_len=9, kv_len=4, relative=seeded(lambda: Clipped(4, 3))),
)

_SINKS = (
    Case("sink", *shared_masks.CAUSAL, sink=True),
    Case("sink-empty-rows", *shared_masks.padding(0, 4), sink=True),
    Case("sink-window", *shared_masks.window(1, 0), num_kv_heads=1, sink=True),
    Case("sink-capped-biased", *shared_masks.CAUSAL, sink=True, softcap=1.5, bias=(2, 4, 7, 7)),
)

_TOGETHER = (
    Case("gaussian-alibi", *shared_masks.CAUSAL, score=seeded(lambda: Gaussian(trainable=True)), relative=ALiBi(4)),
    Case(
        "shaw-keys-scaled-capped", *shared_masks.CAUSAL, scale=0.3, softcap=1.5, relative=seeded(lambda: ShawKeys(8, 2))
    ),
    Case(
        "bilinear-shaw-keys",
        None,
        None,
        key_dim=5,
        score=seeded(lambda: Bilinear(8, 5)),
        relative=seeded(lambda: ShawKeys(8, 2)),
        sink=True,
    ),
    Case(
        "everything",
        *shared_masks.streaming(2, 0),
        key_dim=5,
        value_dim=3,
        scale=0.8,
        softcap=2.0,
        sink=True,
        score=seeded(lambda: Additive(8, 5, 4)),
        relative=seeded(lambda: Clipped(4, 2)),
        **RAGGED,
    ),
    Case(
        "everything-with-a-table",
        *shared_masks.window(3, 1),
        bias=(1, 4, 1, 9),
        q_len=6,
        kv_len=9,
        scale=0.8,
        softcap=2.0,
        sink=True,
        score=seeded(lambda: Gaussian(trainable=True)),
    ),
)

INGREDIENTS: tuple[Case, ...] = (*_SCORES, *_RELATIVE, *_SINKS, *_TOGETHER)

_LARGE = shared_masks.LARGE | {"head_dim": 4}

LARGE_INGREDIENTS: tuple[Case, ...] = (
    Case("large-alibi-padding", *shared_masks.left_padding(450, 193, 450), relative=ALiBi(2), **_LARGE | {"batch": 2}),
    Case(
        "large-shaw-keys-extend",
        *shared_masks.window(200, 25),
        sink=True,
        relative=seeded(lambda: ShawKeys(4, 30)),
        **_LARGE | {"q_len": 230},
    ),
    Case(
        "large-clipped-sparse-transformer", *shared_masks.sparse(21), relative=seeded(lambda: Clipped(2, 100)), **_LARGE
    ),
    Case(
        "large-additive-window",
        *shared_masks.window(40, 25),
        softcap=2.0,
        score=seeded(lambda: Additive(4, 4, 3)),
        **_LARGE,
    ),
)
