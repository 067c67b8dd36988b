"""Test cases with sparse patterns: strides, blocks, prefixes, grids, combinations, and patterns from papers."""

import numpy as np

from saccade.masks import (
    Axial,
    BlockDiffusion,
    Blocks,
    Causal,
    Coarse,
    Documents,
    Full,
    Global,
    ImageBidirectional,
    Neighborhood,
    Padding,
    Prefix,
    PrefixPerDocument,
    Random,
    Segments,
    ShiftedWindows,
    Strided,
    Tree,
    Window,
    bigbird,
    image_columns,
    image_neighbors,
    image_rows,
    longformer,
    prefix_lm,
    shared_prefix,
    sliding_window,
    streaming,
)
from saccade.positions import GridTable
from saccade.testing import shared_masks
from saccade.testing.case import Case, seeded

_LAYOUT = [[True, False, False], [True, True, False], [False, True, False]]
_LAYOUT_PER_HEAD = [
    [[head == row or column < row for column in range(3)] for row in range(3)] for head in range(4)
]  # fmt: skip


def _drawn(blocks_per_row: int, block_size: int, seed: int, rows: int) -> list[list[int]]:
    """Return the key blocks that a `Random` mask draws for each query block, to compute the expected mask of a case."""
    return [list(map(int, row)) for row in Random(blocks_per_row, block_size, seed).drawn(np.arange(rows))]


_PAIRS, _SINGLES, _LARGE = _drawn(2, 2, 5, 8), _drawn(1, 2, 0, 8), _drawn(2, 16, 1, 32)

# Masks that several cases use, each with its rule in plain integers. `_BLOCKY` masks all keys outside its layout.
_BLOCKY = (Blocks(_LAYOUT, 2) | ~Full(), lambda b, h, q, kv: 0 <= q < 6 and 0 <= kv < 6 and _LAYOUT[q // 2][kv // 2])
_RANDOM = (Random(2, 2, 5), lambda b, h, q, kv: q >= 0 and kv // 2 in _PAIRS[q // 2])
_BIGBIRD = (
    bigbird(16, window_blocks=3, global_blocks=2, random_blocks=2, seed=1),
    lambda b, h, q, kv: abs(q // 16 - kv // 16) <= 1 or min(q, kv) < 32 or kv // 16 in _LARGE[q // 16],
)

_STRIDES = (
    Case("strided", *shared_masks.strided(3)),
    Case("strided-all", Strided(1), lambda b, h, q, kv: True),
    Case("strided-extend", *shared_masks.strided(2), q_len=3, kv_len=8),
    Case("strided-decode", *shared_masks.strided(4), q_len=1, kv_len=9),
    Case("strided-more-queries", *shared_masks.strided(3), q_len=9, kv_len=4),
    Case("strided-far", Strided(20), lambda b, h, q, kv: q == kv, q_len=5, kv_len=9),
    Case("not-strided", ~Strided(2), lambda b, h, q, kv: q % 2 != kv % 2),
    Case(
        "strided-padding",
        (Strided(2) | Window(1, 0)) & Padding((5, 3)),
        lambda b, h, q, kv: kv < (5, 3)[b] and (q % 2 == kv % 2 or q - 1 <= kv <= q),
    ),
    Case("strided-biased", Strided(2) | Prefix(1), lambda b, h, q, kv: q % 2 == kv % 2 or kv == 0, bias=(1, 4, 7, 7)),
    Case("two-strides", Strided(2) | Strided(3), lambda b, h, q, kv: q % 2 == kv % 2 or q % 3 == kv % 3),
    Case(
        "strided-documents",
        Documents((3, 4), rule=Causal() & Strided(2)),
        lambda b, h, q, kv: (q < 3) == (kv < 3) and kv <= q and q % 2 == kv % 2,
    ),
    Case(
        "strided-positions",
        Causal() & (Strided(3) | Window(1, 0)),
        lambda b, h, q, kv: kv <= q and (q % 3 == kv % 3 or kv >= q - 1),
        q_len=3,
        kv_len=6,
        q_positions=(7, 9, 10),
        kv_positions=(1, 3, 4, 7, 9, 10),
    ),
)

_BLOCKS = (
    Case("blocks", *_BLOCKY),
    Case("blocks-per-head", Blocks(_LAYOUT_PER_HEAD, 3), lambda b, h, q, kv: h == q // 3 or kv // 3 < q // 3),
    Case("blocks-more-queries", *_BLOCKY, q_len=9, kv_len=5),
    Case(
        "not-blocks",
        ~(Blocks(_LAYOUT, 2) | ~Full()) & Causal(),
        lambda b, h, q, kv: kv <= q and not (q < 6 and kv < 6 and _LAYOUT[q // 2][kv // 2]),
    ),
    Case("coarse", Coarse(Window(1, 0), 2), lambda b, h, q, kv: q // 2 - 1 <= kv // 2 <= q // 2),
    Case("coarse-more-queries", Coarse(Window(0, 0), 3), lambda b, h, q, kv: kv // 3 == q // 3, q_len=8, kv_len=5),
    Case("prefix", Prefix(3), lambda b, h, q, kv: kv < 3),
    Case("prefix-empty", Prefix(0), lambda b, h, q, kv: False),
    Case("prefix-long", Prefix(20), lambda b, h, q, kv: True, q_len=3),
)

_SEGMENTS = (
    Case("segments", Segments(3, 2), lambda b, h, q, kv: q // 3 * 3 - 2 <= kv <= q, q_len=9, kv_len=9),
    Case("segments-alone", Segments(4, 0), lambda b, h, q, kv: q // 4 == kv // 4 and kv <= q, q_len=6, kv_len=11),
    Case("segments-decode", Segments(4, 5), lambda b, h, q, kv: q // 4 * 4 - 5 <= kv <= q, q_len=1, kv_len=11),
    Case("segments-more-queries", Segments(2, 1), lambda b, h, q, kv: q // 2 * 2 - 1 <= kv <= q, q_len=9, kv_len=5),
    Case(
        "segments-positions",
        Segments(3, 1),
        lambda b, h, q, kv: q // 3 * 3 - 1 <= kv <= q,
        q_len=3,
        kv_len=6,
        q_positions=(7, 9, 10),
        kv_positions=(1, 3, 4, 7, 9, 10),
    ),
)

_IMAGES, _PARENTS = (-1, 0, 0, 0, -1, 1, 1), (-1, 0, 0, 1, 2, 1)

_TABLES = (
    Case(
        "image-bidirectional",
        Causal() | ImageBidirectional(_IMAGES),
        lambda b, h, q, kv: kv <= q or (_IMAGES[q] >= 0 and _IMAGES[q] == _IMAGES[kv]),
    ),
    Case(
        "tree",
        Causal() & (Prefix(3) | Tree(_PARENTS).after(3)),
        lambda b, h, q, kv: kv <= q and (kv < 3 or kv - 3 in _path(q - 3)),
        q_len=6,
        kv_len=9,
    ),
    Case(
        "block-diffusion",
        BlockDiffusion(2, 5),
        lambda b, h, q, kv: q // 2 == kv // 2 if max(q, kv) < 5 else _sees_clean(q, kv),
        q_len=10,
        kv_len=10,
    ),
    Case(
        "prefix-per-document",
        Documents((4, 3), rule=Causal()) | PrefixPerDocument((4, 3), (2, 3)),
        lambda b, h, q, kv: (q < 4) == (kv < 4) and (kv <= q or kv < 2 or 4 <= kv < 7),
    ),
    Case(
        "recipe-shared-prefix",
        shared_prefix((2, 2, 3)),
        lambda b, h, q, kv: kv <= q and (kv < 2 or (q < 4) == (kv < 4)),
    ),
)

_DRAWS = (
    Case("random", *_RANDOM),
    Case("random-longer", *_RANDOM, kv_len=12),
    Case("random-more-queries", *_RANDOM, q_len=9, kv_len=5),
    Case("random-causal", Random(2, 2, 5) & Causal(), lambda b, h, q, kv: kv <= q and kv // 2 in _PAIRS[q // 2]),
)

_RECIPES = (
    Case("recipe-sliding-window", sliding_window(3), lambda b, h, q, kv: q - 3 < kv <= q),
    Case("recipe-longformer", longformer(1, (0, 4)), lambda b, h, q, kv: abs(q - kv) <= 1 or {q, kv} & {0, 4} != set()),
    Case(
        "recipe-bigbird",
        bigbird(2, window_blocks=1, global_blocks=1, random_blocks=1),
        lambda b, h, q, kv: q // 2 == kv // 2 or min(q, kv) < 2 or kv // 2 in _SINGLES[q // 2],
        q_len=8,
        kv_len=8,
    ),
    Case(
        "recipe-bigbird-causal",
        Causal() & bigbird(2, window_blocks=3, global_blocks=0, random_blocks=1),
        lambda b, h, q, kv: kv <= q and (q // 2 - kv // 2 <= 1 or kv // 2 in _SINGLES[q // 2]),
        q_len=5,
        kv_len=11,
    ),
    Case("recipe-streaming", streaming(1, 2), lambda b, h, q, kv: kv <= q and (kv == 0 or kv > q - 2)),
    Case(
        "recipe-streaming-extend",
        streaming(2, 2),
        lambda b, h, q, kv: kv <= q and (kv < 2 or kv > q - 2),
        q_len=3,
        kv_len=9,
    ),
    Case("recipe-sparse-transformer", *shared_masks.sparse(3), q_len=8, kv_len=8),
    Case("recipe-sparse-transformer-extend", *shared_masks.sparse(3), q_len=4, kv_len=11),
    Case("recipe-prefix-lm", prefix_lm(3), lambda b, h, q, kv: kv <= q or kv < 3),
    Case("recipe-prefix-lm-extend", prefix_lm(4), lambda b, h, q, kv: kv <= q or kv < 4, q_len=6, kv_len=8),
    Case(
        "recipe-image-rows",
        image_rows(2, 3, 3),
        lambda b, h, q, kv: kv <= q and (kv < 2 or (q - 2) // 3 == (kv - 2) // 3),
        q_len=11,
        kv_len=11,
    ),
    Case(
        "recipe-image-columns-extend",
        image_columns(3, 3, 2),
        lambda b, h, q, kv: kv <= q and (kv < 3 or q % 2 == kv % 2),
        q_len=7,
        kv_len=9,
    ),
    Case(
        "recipe-image-neighbors",
        image_neighbors(1, 2, 5, (1, 2)),
        lambda b, h, q, kv: kv <= q and (kv < 1 or _is_near(q - 1, kv - 1)),
        q_len=11,
        kv_len=11,
    ),
)

PATTERNS: tuple[Case, ...] = (*_STRIDES, *_BLOCKS, *_SEGMENTS, *_TABLES, *_DRAWS, *_RECIPES)

LARGE_PATTERNS: tuple[Case, ...] = (
    Case("large-strided", *shared_masks.strided(21), **shared_masks.LARGE),
    Case("large-sparse-transformer-extend", *shared_masks.sparse(21), **shared_masks.LARGE | {"q_len": 230}),
    Case("large-bigbird", *_BIGBIRD, **shared_masks.LARGE),
    Case("large-bigbird-extend", *_BIGBIRD, **shared_masks.LARGE | {"q_len": 40}),
    Case("large-prefix-lm", prefix_lm(100), lambda b, h, q, kv: kv <= q or kv < 100, **shared_masks.LARGE),
    Case(
        "large-strided-global",
        Strided(10) | Global((3,)) | Window(5, 5),
        lambda b, h, q, kv: q % 10 == kv % 10 or 3 in (q, kv) or abs(q - kv) <= 5,
        **shared_masks.LARGE,
    ),
)


def _is_near(q: int, kv: int) -> bool:
    """Return whether two tokens of a test case, on a grid of width 5, are at most one row and two columns apart."""
    return abs(q // 5 - kv // 5) <= 1 and abs(q % 5 - kv % 5) <= 2


def _path(token: int) -> list[int]:
    """Return a token of the test case's tree, followed by all of its ancestors."""
    return [] if token < 0 else [token, *_path(_PARENTS[token])]


def _sees_clean(q: int, kv: int) -> bool:
    """Return whether a query of the block-diffusion case, with 5 tokens in blocks of 2, may attend to a clean key."""
    return kv >= 5 and ((kv - 5) // 2 < q // 2 if q < 5 else (kv - 5) // 2 <= (q - 5) // 2)


def _share_window(q: int, kv: int) -> bool:
    """Return whether two tokens of a test case, on a grid of width 4, share a 2 x 2 window shifted by (1, 1)."""
    return (q // 4 + 1) // 2 == (kv // 4 + 1) // 2 and (q % 4 + 1) // 2 == (kv % 4 + 1) // 2


GRIDS: tuple[Case, ...] = (
    Case("neighborhood", Neighborhood(2, 5, (1, 2)), lambda b, h, q, kv: _is_near(q, kv), q_len=10, kv_len=10),
    Case("neighborhood-extend", Neighborhood(3, 5, (1, 2)), lambda b, h, q, kv: _is_near(q, kv), q_len=4, kv_len=12),
    Case("axial", Axial(3, 4), lambda b, h, q, kv: q // 4 == kv // 4 or q % 4 == kv % 4, q_len=12, kv_len=12),
    Case(
        "shifted-windows",
        ShiftedWindows(3, 4, 2, shift=1),
        lambda b, h, q, kv: _share_window(q, kv),
        q_len=12,
        kv_len=12,
        relative=seeded(lambda: GridTable(4, 3, 4)),
    ),
    Case("window-after", Window(1, 1).after(2), lambda b, h, q, kv: min(q, kv) >= 2 and abs(q - kv) <= 1),
)
