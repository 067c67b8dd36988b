"""`SIZE_CASES`: test cases at the sizes of real models, for block edges, widths, grouped heads, documents, decoding.

These cases have no rules in plain integers, so they do not reveal mistakes in the masks. The cases in `CASES` do.
"""

from __future__ import annotations

from saccade.masks import Causal, Documents, Global, Mask, Padding, Window
from saccade.testing.case import Case

_UNEVEN = (1, 2, 30, 63, 64, 65, 3, 96, 128, 7, 53)
"""Document lengths with a sum of 512 tokens."""

_MANY = tuple(1 + 5 * n % 13 for n in range(100))
"""Lengths of 100 documents, 1 to 13 tokens each, with a sum of 696."""


def _case(
    name: str, mask: Mask | None, batch: int, heads: tuple[int, int], lengths: tuple[int, int], widths: tuple[int, int]
) -> Case:
    """Build a case. Heads and lengths are pairs (query, key); widths are (query and key, value)."""
    (num_heads, num_kv_heads), (q_len, kv_len), (head_dim, value_dim) = heads, lengths, widths
    return Case(
        f"size-{name}",
        mask,
        batch=batch,
        num_heads=num_heads,
        num_kv_heads=num_kv_heads,
        q_len=q_len,
        kv_len=kv_len,
        head_dim=head_dim,
        value_dim=value_dim,
    )


_STREAMING = Causal() & (Window(128, 0) | Global((0, 1, 2, 3)))
_TAIL = Documents(((64, 1, 127, 3), (130,)), rule=Causal())  # the second item ends before the first

SIZE_CASES = (
    _case("63", Causal(), 1, (2, 1), (63, 63), (32, 32)),
    _case("64", None, 2, (3, 3), (64, 64), (64, 64)),
    _case("65", Causal(), 1, (8, 2), (65, 65), (96, 96)),
    _case("127", Causal() & Window(63, 0), 2, (2, 2), (127, 127), (128, 128)),
    _case("128", Padding((128, 1, 77)), 3, (2, 2), (128, 128), (64, 64)),
    _case("129", Causal(), 1, (2, 1), (129, 129), (192, 128)),
    _case("192", Window(64, 64), 2, (1, 1), (192, 192), (256, 256)),
    _case("257", Causal(), 2, (8, 4), (257, 257), (64, 64)),
    _case("512", Documents(_UNEVEN, rule=Causal()), 1, (2, 2), (512, 512), (32, 32)),
    _case("704", _STREAMING, 1, (2, 1), (704, 704), (64, 64)),
    _case("2047", Causal(), 1, (1, 1), (2047, 2047), (64, 64)),
    _case("32-heads", Causal(), 1, (32, 8), (130, 130), (64, 64)),
    _case("decode", None, 2, (32, 4), (1, 2047), (64, 64)),
    _case("few-queries", Causal(), 2, (4, 1), (5, 704), (128, 128)),
    _case("extend", Causal(), 1, (4, 2), (65, 257), (64, 64)),
    _case("many-documents", Documents(_MANY, rule=Causal()), 1, (2, 1), (696, 696), (32, 32)),
    _case("packed-tail", _TAIL, 2, (2, 2), (195, 195), (64, 64)),
    _case(
        "left-padding", Padding((129, 64, 1), side="left", padded_len=129) & Causal(), 3, (2, 1), (129, 129), (32, 64)
    ),
    _case("decode-64", None, 1, (8, 1), (1, 64), (128, 128)),
    _case("decode-65", None, 1, (8, 8), (1, 65), (32, 32)),
    _case("decode-ragged", Padding((257, 64, 1, 129)), 4, (32, 4), (1, 257), (64, 64)),
    _case("two-queries", Causal(), 2, (3, 1), (2, 129), (96, 64)),
)

SHORT_CASES = tuple(case for case in SIZE_CASES if case.q_len <= 257 and case.kv_len <= 257)
"""The size cases of at most 257 tokens, for laws that call a function many times."""
