"""`CASES` and `LARGE_CASES` for the laws: every kind of mask, score and bias, and sizes at which kernels often fail."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import torch

from saccade.masks import Causal, Dense, Documents, Full, Global, Padding, PerItem, Window
from saccade.positions import T5, ALiBi, Bias, Clipped, GridTable, ShawKeys
from saccade.scores import Additive, Bilinear, Cosine, Dot, Gaussian
from saccade.testing import shared_masks
from saccade.testing.case import Case, seeded
from saccade.testing.pattern_cases import GRIDS, LARGE_PATTERNS, PATTERNS

_DRAWN = torch.rand(2, 4, 7, 7, generator=torch.Generator().manual_seed(7)) < 0.5
_DRAWN[:, 1, 3] = False  # one head has a row without any visible key
_TABLE = _DRAWN.tolist()
_TWO = shared_masks.document_of(3, 4)
_PER_ITEM = (_TWO, shared_masks.document_of(5, 1, 1))

_PLAIN = (
    Case("none"),
    Case("full", Full(), lambda b, h, q, kv: True),
    Case("nothing", ~Full(), lambda b, h, q, kv: False),
    Case("one-token", *shared_masks.CAUSAL, q_len=1, kv_len=1),
    Case("one-head", batch=1, num_heads=1, num_kv_heads=1),
    Case("all-heads-share", num_kv_heads=1),
    Case("no-heads-share", num_kv_heads=4),
    Case("thin", head_dim=1, value_dim=1),
    Case("widths-differ", *shared_masks.CAUSAL, head_dim=3, value_dim=5),
    Case("more-keys", q_len=5, kv_len=9),
    Case("more-queries", q_len=9, kv_len=4),
)

_CAUSALS = (
    Case("causal", *shared_masks.CAUSAL),
    Case("causal-extend", *shared_masks.CAUSAL, q_len=3, kv_len=9),
    Case("causal-decode", *shared_masks.CAUSAL, q_len=1, kv_len=9),
    Case("causal-more-queries", *shared_masks.CAUSAL, q_len=9, kv_len=4),
)

_WINDOWS = (
    Case("window", *shared_masks.window(2, 1)),
    Case("window-past", *shared_masks.window(2, 0)),
    Case("window-extend", *shared_masks.window(2, 0), q_len=3, kv_len=9),
    Case("window-self", *shared_masks.window(0, 0)),
    Case("window-ahead", Window(0, None), lambda b, h, q, kv: kv >= q),
    Case("window-misses", *shared_masks.window(1, 1), q_len=9, kv_len=4),
    Case("not-window", ~Window(1, 1), lambda b, h, q, kv: abs(q - kv) > 1),
)

_GLOBALS = (
    Case("global", Global((0, 3)), lambda b, h, q, kv: q in (0, 3) or kv in (0, 3)),
    Case("global-sees", Global((2,), seen=False), lambda b, h, q, kv: q == 2),
    Case("global-seen", Global((2,), sees=False), lambda b, h, q, kv: kv == 2),
    Case("longformer", Window(1, 1) | Global((4,)), lambda b, h, q, kv: abs(q - kv) <= 1 or 4 in (q, kv)),
    Case("streaming", *shared_masks.streaming(2, 0)),
    Case("streaming-extend", *shared_masks.streaming(2, 0), q_len=3, kv_len=9),
)

_BATCHES = (
    Case("padding", *shared_masks.padding(4, 7)),
    Case("padding-empty-item", *shared_masks.padding(0, 7)),
    Case("padding-left", *shared_masks.left_padding(7, 4, 7)),
    Case("padding-decode", *shared_masks.padding(4, 9), q_len=1, kv_len=9),
    Case("documents", *shared_masks.documents(3, 4)),
    Case(
        "documents-per-item",
        Documents(((3, 4), (5, 1, 1))) & Causal(),
        lambda b, h, q, kv: kv <= q and _PER_ITEM[b][q] == _PER_ITEM[b][kv],
    ),
    Case(
        "documents-rule",
        Documents((3, 4), rule=Causal() & (Window(1, 0) | Global((0,)))),
        lambda b, h, q, kv: _TWO[q] == _TWO[kv] and kv <= q and (kv >= q - 1 or kv in (0, 3)),
    ),
)

_EACH = (Window(1, 0), Causal(), Window(0, 2) | Global((4,)))

_PER_ITEMS = (
    Case(
        "per-item",
        PerItem(_EACH[:2]) & Padding((5, 7)),
        lambda b, h, q, kv: kv <= q and kv < (5, 7)[b] and (b == 1 or kv >= q - 1),
    ),
    Case(
        "per-item-globals",
        PerItem((Window(1, 1) | Global((0,)), Window(1, 1) | Global((2, 5)))),
        lambda b, h, q, kv: abs(q - kv) <= 1 or bool({q, kv} & ({0}, {2, 5})[b]),
    ),
)

_FREE = (
    Case("predicate", *shared_masks.MIXED),
    Case("dense", Dense(_DRAWN), lambda b, h, q, kv: _TABLE[b][h][q][kv]),
    Case(
        "joined",
        (Causal() & ~Window(1, 0)) | (Global((5,)) & Padding((6, 3))),
        lambda b, h, q, kv: kv < q - 1 or (5 in (q, kv) and kv < (6, 3)[b]),
    ),
)

_OPTIONS = (
    Case("scaled", *shared_masks.CAUSAL, scale=0.7),
    Case("capped", *shared_masks.CAUSAL, softcap=1.5),
    Case("biased", *shared_masks.CAUSAL, bias=(1, 4, 7, 7)),
    Case("biased-keys", *shared_masks.window(2, 2), bias=(2, 1, 1, 7)),
    Case("all-options", *shared_masks.CAUSAL, scale=0.4, softcap=2.0, bias=(2, 4, 7, 7)),
)

# Sizes and positions for sequences of different lengths, for a cache with evicted keys, and for shuffled tokens.
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
    """Yield the test cases of one relative bias, for several kinds of positions."""
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

_THIN = shared_masks.LARGE | {"head_dim": 4}

LARGE_INGREDIENTS: tuple[Case, ...] = (
    Case("large-alibi-padding", *shared_masks.left_padding(450, 193, 450), relative=ALiBi(2), **_THIN | {"batch": 2}),
    Case(
        "large-shaw-keys-extend",
        *shared_masks.window(200, 25),
        sink=True,
        relative=seeded(lambda: ShawKeys(4, 30)),
        **_THIN | {"q_len": 230},
    ),
    Case(
        "large-clipped-sparse-transformer", *shared_masks.sparse(21), relative=seeded(lambda: Clipped(2, 100)), **_THIN
    ),
    Case(
        "large-additive-window",
        *shared_masks.window(40, 25),
        softcap=2.0,
        score=seeded(lambda: Additive(4, 4, 3)),
        **_THIN,
    ),
)

_POSITIONS = (
    Case("evicted-cache", *shared_masks.streaming(3, 0), **EVICTED),
    Case("ragged", *shared_masks.CAUSAL, **RAGGED),
    Case(
        "holes", None, lambda b, h, q, kv: True, q_len=3, kv_len=4, q_positions=(1, -1, 3), kv_positions=(0, -1, 2, -1)
    ),
    Case("shuffled", *shared_masks.window(2, 0), **SHUFFLED),
)

# Mask tensors that equal a known mask, at sizes where saccade tries to recognise that mask.
_INDEX = torch.arange(450)
_TRIL, _TOKENS = torch.ones(450, 450, dtype=torch.bool).tril(), torch.tensor([[450], [200], [1]]) > _INDEX
_SINK_MASK = _TRIL & ((_INDEX[:, None] - _INDEX < 70) | (_INDEX < 3))

_LARGE = (
    Case("large-full", Full(), lambda b, h, q, kv: True, **shared_masks.LARGE),
    Case("large-causal", *shared_masks.CAUSAL, **shared_masks.LARGE),
    Case("large-causal-extend", *shared_masks.CAUSAL, **shared_masks.LARGE | {"q_len": 230}),
    Case("large-window", *shared_masks.window(40, 25), **shared_masks.LARGE),
    Case("large-streaming", *shared_masks.streaming(70, 0, 300), **shared_masks.LARGE),
    Case("large-padding", *shared_masks.left_padding(450, 193, 450), **shared_masks.LARGE | {"batch": 2}),
    Case("large-documents", *shared_masks.documents(200, 1, 150, 99), **shared_masks.LARGE),
    Case(
        "large-per-item",
        PerItem(_EACH),
        lambda b, h, q, kv: (q - 1 <= kv <= q, kv <= q, q <= kv <= q + 2 or 4 in (q, kv))[b],
        **shared_masks.LARGE | {"batch": 3},
    ),
    Case(
        "large-dense-padding",
        Dense(_TRIL & _TOKENS[:, None, None]),
        lambda b, h, q, kv: kv <= q and kv < (450, 200, 1)[b],
        **shared_masks.LARGE | {"batch": 3},
    ),
    Case(
        "large-dense-sinks",
        Dense(_SINK_MASK),
        lambda b, h, q, kv: kv <= q and (q - kv < 70 or kv < 3),
        **shared_masks.LARGE | {"batch": 3},
    ),
)

CASES: tuple[Case, ...] = (
    *_PLAIN,
    *_CAUSALS,
    *_WINDOWS,
    *_GLOBALS,
    *_BATCHES,
    *_PER_ITEMS,
    *_FREE,
    *_OPTIONS,
    *_POSITIONS,
    *PATTERNS,
    *INGREDIENTS,
    *GRIDS,
)

# Sequences that span several tiles, with edges of the mask inside tiles.
LARGE_CASES: tuple[Case, ...] = (*_LARGE, *LARGE_PATTERNS, *LARGE_INGREDIENTS)
