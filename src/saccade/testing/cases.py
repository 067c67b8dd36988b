"""The cases that the laws are tried on: every kind of mask, joined masks, and shapes that often go wrong."""

import torch

from saccade.masks import Causal, Dense, Documents, Full, Global, Padding, Predicate, Window
from saccade.testing.case import Case
from saccade.testing.ingredients import EVICTED, INGREDIENTS, LARGE_INGREDIENTS, RAGGED, SHUFFLED
from saccade.testing.patterns import GRIDS, LARGE_PATTERNS, PATTERNS

__all__ = ["CASES", "LARGE_CASES"]

_DRAWN = torch.rand(2, 4, 7, 7, generator=torch.Generator().manual_seed(7)) < 0.5
_DRAWN[:, 1, 3] = False  # one head has a row that sees nothing
_TABLE = _DRAWN.tolist()


def _documents(*lengths: int) -> tuple[int, ...]:
    """The document of each position."""
    return tuple(document for document, length in enumerate(lengths) for _ in range(length))


_TWO = _documents(3, 4)
_PER_ITEM = (_documents(3, 4), _documents(5, 1, 1))
_LONG = _documents(200, 1, 150, 99)

# Masks that several cases share, each with the same in plain integers.
_CAUSAL = (Causal(), lambda b, h, q, kv: kv <= q)
_STREAMING = (Causal() & (Window(2, 0) | Global((0,))), lambda b, h, q, kv: kv <= q and (kv >= q - 2 or 0 in (q, kv)))

_PLAIN = (
    Case("none"),
    Case("full", Full(), lambda b, h, q, kv: True),
    Case("nothing", ~Full(), lambda b, h, q, kv: False),
    Case("one-token", *_CAUSAL, q_len=1, kv_len=1),
    Case("one-head", batch=1, num_heads=1, num_kv_heads=1),
    Case("all-heads-share", num_kv_heads=1),
    Case("no-heads-share", num_kv_heads=4),
    Case("thin", head_dim=1, value_dim=1),
    Case("widths-differ", *_CAUSAL, head_dim=3, value_dim=5),
    Case("more-keys", q_len=5, kv_len=9),
    Case("more-queries", q_len=9, kv_len=4),
)

_CAUSALS = (
    Case("causal", *_CAUSAL),
    Case("causal-extend", *_CAUSAL, q_len=3, kv_len=9),
    Case("causal-decode", *_CAUSAL, q_len=1, kv_len=9),
    Case("causal-more-queries", *_CAUSAL, q_len=9, kv_len=4),
)

_WINDOWS = (
    Case("window", Window(2, 1), lambda b, h, q, kv: q - 2 <= kv <= q + 1),
    Case("window-past", Window(2, 0), lambda b, h, q, kv: q - 2 <= kv <= q),
    Case("window-extend", Window(2, 0), lambda b, h, q, kv: q - 2 <= kv <= q, q_len=3, kv_len=9),
    Case("window-self", Window(0, 0), lambda b, h, q, kv: kv == q),
    Case("window-ahead", Window(0, None), lambda b, h, q, kv: kv >= q),
    Case("window-misses", Window(1, 1), lambda b, h, q, kv: abs(q - kv) <= 1, q_len=9, kv_len=4),
    Case("not-window", ~Window(1, 1), lambda b, h, q, kv: abs(q - kv) > 1),
)

_GLOBALS = (
    Case("global", Global((0, 3)), lambda b, h, q, kv: q in (0, 3) or kv in (0, 3)),
    Case("global-sees", Global((2,), seen=False), lambda b, h, q, kv: q == 2),
    Case("global-seen", Global((2,), sees=False), lambda b, h, q, kv: kv == 2),
    Case("longformer", Window(1, 1) | Global((4,)), lambda b, h, q, kv: abs(q - kv) <= 1 or 4 in (q, kv)),
    Case("streaming", *_STREAMING),
    Case("streaming-extend", *_STREAMING, q_len=3, kv_len=9),
)

_BATCHES = (
    Case("padding", Padding((4, 7)), lambda b, h, q, kv: kv < (4, 7)[b]),
    Case("padding-empty-item", Padding((0, 7)), lambda b, h, q, kv: kv < (0, 7)[b]),
    Case(
        "padding-left", Padding((4, 7), side="left", padded_len=7) & Causal(), lambda b, h, q, kv: (3, 0)[b] <= kv <= q
    ),
    Case("padding-decode", Padding((4, 9)), lambda b, h, q, kv: kv < (4, 9)[b], q_len=1, kv_len=9),
    Case("documents", Documents((3, 4)), lambda b, h, q, kv: _TWO[q] == _TWO[kv]),
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

_FREE = (
    Case(
        "predicate",
        Predicate(lambda b, h, q, kv: (q + kv + h + b) % 3 != 0),
        lambda b, h, q, kv: (q + kv + h + b) % 3 != 0,
    ),
    Case("dense", Dense(_DRAWN), lambda b, h, q, kv: _TABLE[b][h][q][kv]),
    Case(
        "joined",
        (Causal() & ~Window(1, 0)) | (Global((5,)) & Padding((6, 3))),
        lambda b, h, q, kv: kv < q - 1 or (5 in (q, kv) and kv < (6, 3)[b]),
    ),
)

_OPTIONS = (
    Case("scaled", *_CAUSAL, scale=0.7),
    Case("capped", *_CAUSAL, softcap=1.5),
    Case("biased", *_CAUSAL, bias=(1, 4, 7, 7)),
    Case("biased-keys", Window(2, 2), lambda b, h, q, kv: abs(q - kv) <= 2, bias=(2, 1, 1, 7)),
    Case("all-options", *_CAUSAL, scale=0.4, softcap=2.0, bias=(2, 4, 7, 7)),
)

_POSITIONS = (
    Case(
        "evicted-cache",
        Causal() & (Window(3, 0) | Global((0,))),
        lambda b, h, q, kv: kv <= q and (kv >= q - 3 or 0 in (q, kv)),
        **EVICTED,
    ),
    Case("ragged", *_CAUSAL, **RAGGED),
    Case(
        "holes", None, lambda b, h, q, kv: True, q_len=3, kv_len=4, q_positions=(1, -1, 3), kv_positions=(0, -1, 2, -1)
    ),
    Case("shuffled", Window(2, 0), lambda b, h, q, kv: q - 2 <= kv <= q, **SHUFFLED),
)

_LARGE = tuple(
    Case(name, mask, rule, batch=batch, num_heads=2, num_kv_heads=1, q_len=q_len, kv_len=450)
    for name, mask, rule, batch, q_len in (
        ("large-full", Full(), lambda b, h, q, kv: True, 1, 450),
        ("large-causal", *_CAUSAL, 1, 450),
        ("large-causal-extend", *_CAUSAL, 1, 230),
        ("large-window", Window(40, 25), lambda b, h, q, kv: q - 40 <= kv <= q + 25, 1, 450),
        (
            "large-streaming",
            Causal() & (Window(70, 0) | Global((0, 300))),
            lambda b, h, q, kv: kv <= q and (kv >= q - 70 or kv in (0, 300) or q in (0, 300)),
            1,
            450,
        ),
        (
            "large-padding",
            Padding((193, 450), side="left", padded_len=450) & Causal(),
            lambda b, h, q, kv: (257, 0)[b] <= kv <= q,
            2,
            450,
        ),
        ("large-documents", Documents((200, 1, 150, 99)), lambda b, h, q, kv: _LONG[q] == _LONG[kv], 1, 450),
    )
)

CASES: tuple[Case, ...] = (
    *_PLAIN,
    *_CAUSALS,
    *_WINDOWS,
    *_GLOBALS,
    *_BATCHES,
    *_FREE,
    *_OPTIONS,
    *_POSITIONS,
    *PATTERNS,
    *INGREDIENTS,
    *GRIDS,
)

# Long enough that an implementation which works in tiles has several, with edges that fall inside of them.
LARGE_CASES: tuple[Case, ...] = (*_LARGE, *LARGE_PATTERNS, *LARGE_INGREDIENTS)
