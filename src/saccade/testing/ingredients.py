"""The cases of scores, relative biases and sinks, alone and together."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

from saccade.masks import Causal, Documents, Global, Padding, Predicate, Strided, Window, sparse_transformer
from saccade.positions import T5, ALiBi, Bias, Clipped, GridTable, ShawKeys
from saccade.scores import Additive, Bilinear, Cosine, Dot, Gaussian
from saccade.testing.case import Case
from saccade.testing.seeded import seeded

__all__ = ["EVICTED", "INGREDIENTS", "LARGE_INGREDIENTS", "RAGGED", "SHUFFLED"]


def _is_past(b: int, h: int, q: int, kv: int) -> bool:
    return kv <= q


# Where tokens may stand: lines of different lengths, a cache from which keys are gone, and any order.
RAGGED: dict[str, Any] = {
    "q_len": 3,
    "kv_len": 5,
    "q_positions": ((2, 3, 4), (0, 1, -1)),
    "kv_positions": ((0, 1, 2, 3, 4), (0, 1, -1, -1, -1)),
}
EVICTED: dict[str, Any] = {"q_len": 2, "kv_len": 6, "q_positions": (40, 41), "kv_positions": (0, 1, 37, 38, 40, 41)}
SHUFFLED: dict[str, Any] = {"q_len": 4, "kv_len": 6, "q_positions": (3, 0, 5, 2), "kv_positions": (4, 1, 0, 5, 3, 2)}

_SCORES = (
    Case("dot-unscaled", Causal(), _is_past, score=Dot(scaled=False)),
    Case("bilinear", Causal(), _is_past, score=seeded(lambda: Bilinear(8, 8))),
    Case(
        "bilinear-widths-differ",
        Padding((4, 7)),
        lambda b, h, q, kv: kv < (4, 7)[b],
        key_dim=5,
        score=seeded(lambda: Bilinear(8, 5)),
    ),
    Case("additive", Window(2, 1), lambda b, h, q, kv: q - 2 <= kv <= q + 1, score=seeded(lambda: Additive(8, 8, 5))),
    Case(
        "additive-widths-differ",
        Causal(),
        _is_past,
        key_dim=3,
        q_len=3,
        kv_len=9,
        num_kv_heads=1,
        score=seeded(lambda: Additive(8, 3, 4)),
    ),
    Case("cosine", Documents((3, 4)), lambda b, h, q, kv: (q < 3) == (kv < 3), scale=10.0, score=Cosine()),
    Case("cosine-evicted-cache", Causal(), _is_past, score=Cosine(), **EVICTED),
    Case("gaussian", None, None, q_len=5, kv_len=9, score=seeded(lambda: Gaussian(trainable=True))),
    Case("gaussian-decode", Causal(), _is_past, q_len=1, kv_len=9, score=Gaussian(2.0)),
    Case(
        "gaussian-empty-rows",
        Window(1, 1),
        lambda b, h, q, kv: abs(q - kv) <= 1,
        q_len=9,
        kv_len=4,
        score=Gaussian(0.7),
    ),
)


def _relative(name: str, build: Callable[[], Bias], **options: Any) -> Iterator[Case]:
    """One relative bias wherever tokens may stand."""
    bias = seeded(build)
    yield Case(name, Window(2, 3), lambda b, h, q, kv: q - 2 <= kv <= q + 3, relative=bias, **options)
    yield Case(f"{name}-extend", None, None, q_len=3, kv_len=9, relative=bias, **options)
    yield Case(f"{name}-decode", Causal(), _is_past, q_len=1, kv_len=9, relative=bias, **options)
    yield Case(f"{name}-ragged", Causal(), _is_past, relative=bias, **RAGGED, **options)


_RELATIVE = (
    *_relative("alibi", lambda: ALiBi(4)),
    *_relative("clipped", lambda: Clipped(4, 2)),
    *_relative("t5", lambda: T5(4, num_buckets=8, max_distance=6), scale=1.0),
    *_relative("shaw-keys", lambda: ShawKeys(8, 2)),
    *_relative("grid-table", lambda: GridTable(4, 2, 5)),
    Case("alibi-six-heads", Causal(), _is_past, num_heads=6, relative=ALiBi(6)),
    Case("alibi-evicted-cache", Causal(), _is_past, relative=ALiBi(4), **EVICTED),
    Case(
        "t5-decoder",
        Causal(),
        _is_past,
        q_len=4,
        kv_len=11,
        scale=1.0,
        relative=seeded(lambda: T5(4, num_buckets=6, max_distance=9, bidirectional=False)),
    ),
    Case(
        "clipped-strided",
        Strided(3),
        lambda b, h, q, kv: q % 3 == kv % 3,
        q_len=8,
        kv_len=11,
        relative=seeded(lambda: Clipped(4, 4)),
    ),
    Case(
        "shaw-keys-predicate",
        Predicate(lambda b, h, q, kv: (q + kv + h + b) % 3 != 0),
        lambda b, h, q, kv: (q + kv + h + b) % 3 != 0,
        relative=seeded(lambda: ShawKeys(8, 1)),
    ),
    Case(
        "shaw-keys-shuffled",
        Window(2, 2),
        lambda b, h, q, kv: abs(q - kv) <= 2,
        relative=seeded(lambda: ShawKeys(8, 3)),
        **SHUFFLED,
    ),
    Case("clipped-more-queries", None, None, q_len=9, kv_len=4, relative=seeded(lambda: Clipped(4, 3))),
)

_SINKS = (
    Case("sink", Causal(), _is_past, sink=True),
    Case("sink-empty-rows", Padding((0, 4)), lambda b, h, q, kv: kv < (0, 4)[b], sink=True),
    Case("sink-window", Window(1, 0), lambda b, h, q, kv: q - 1 <= kv <= q, num_kv_heads=1, sink=True),
    Case("sink-capped-biased", Causal(), _is_past, sink=True, softcap=1.5, bias=(2, 4, 7, 7)),
)

_TOGETHER = (
    Case("gaussian-alibi", Causal(), _is_past, score=seeded(lambda: Gaussian(trainable=True)), relative=ALiBi(4)),
    Case(
        "shaw-keys-scaled-capped", Causal(), _is_past, scale=0.3, softcap=1.5, relative=seeded(lambda: ShawKeys(8, 2))
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
        Causal() & (Window(2, 0) | Global((0,))),
        lambda b, h, q, kv: kv <= q and (kv >= q - 2 or 0 in (q, kv)),
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
        Window(3, 1),
        lambda b, h, q, kv: q - 3 <= kv <= q + 1,
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

_LARGE: dict[str, Any] = {"batch": 1, "num_heads": 2, "num_kv_heads": 1, "q_len": 450, "kv_len": 450, "head_dim": 4}

LARGE_INGREDIENTS: tuple[Case, ...] = (
    Case(
        "large-alibi-padding",
        Padding((193, 450), side="left", padded_len=450) & Causal(),
        lambda b, h, q, kv: (257, 0)[b] <= kv <= q,
        relative=ALiBi(2),
        **_LARGE | {"batch": 2},
    ),
    Case(
        "large-shaw-keys-extend",
        Window(200, 25),
        lambda b, h, q, kv: q - 200 <= kv <= q + 25,
        sink=True,
        relative=seeded(lambda: ShawKeys(4, 30)),
        **_LARGE | {"q_len": 230},
    ),
    Case(
        "large-clipped-sparse-transformer",
        sparse_transformer(21),
        lambda b, h, q, kv: kv <= q and (kv >= q - 21 or q % 21 == kv % 21),
        relative=seeded(lambda: Clipped(2, 100)),
        **_LARGE,
    ),
    Case(
        "large-additive-window",
        Window(40, 25),
        lambda b, h, q, kv: q - 40 <= kv <= q + 25,
        softcap=2.0,
        score=seeded(lambda: Additive(4, 4, 3)),
        **_LARGE,
    ),
)
