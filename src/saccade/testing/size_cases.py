"""`SIZE_CASES` for the laws about the sizes of models: block edges, widths, groups of heads, many documents, decoding.

The masks are read as tensors: rules of plain integers, which reveal mistakes of the masks, stand in `CASES`.
"""

from __future__ import annotations

from saccade.masks import Causal, Documents, Global, Padding, Window
from saccade.testing.case import Case

_UNEVEN = (1, 2, 30, 63, 64, 65, 3, 96, 128, 7, 53)
"""Lengths of documents, 512 tokens together."""

SIZE_CASES = (
    Case("size-63", Causal(), batch=1, num_heads=2, num_kv_heads=1, q_len=63, kv_len=63, head_dim=32, value_dim=32),
    Case("size-64", None, batch=2, num_heads=3, num_kv_heads=3, q_len=64, kv_len=64, head_dim=64, value_dim=64),
    Case("size-65", Causal(), batch=1, num_heads=8, num_kv_heads=2, q_len=65, kv_len=65, head_dim=96, value_dim=96),
    Case(
        "size-127",
        Causal() & Window(63, 0),
        batch=2,
        num_heads=2,
        num_kv_heads=2,
        q_len=127,
        kv_len=127,
        head_dim=128,
        value_dim=128,
    ),
    Case(
        "size-128",
        Padding((128, 1, 77)),
        batch=3,
        num_heads=2,
        num_kv_heads=2,
        q_len=128,
        kv_len=128,
        head_dim=64,
        value_dim=64,
    ),
    Case(
        "size-129", Causal(), batch=1, num_heads=2, num_kv_heads=1, q_len=129, kv_len=129, head_dim=192, value_dim=128
    ),
    Case(
        "size-192",
        Window(64, 64),
        batch=2,
        num_heads=1,
        num_kv_heads=1,
        q_len=192,
        kv_len=192,
        head_dim=256,
        value_dim=256,
    ),
    Case("size-257", Causal(), batch=2, num_heads=8, num_kv_heads=4, q_len=257, kv_len=257, head_dim=64, value_dim=64),
    Case(
        "size-512",
        Documents(_UNEVEN, rule=Causal()),
        batch=1,
        num_heads=2,
        num_kv_heads=2,
        q_len=512,
        kv_len=512,
        head_dim=32,
        value_dim=32,
    ),
    Case(
        "size-704",
        Causal() & (Window(128, 0) | Global((0, 1, 2, 3))),
        batch=1,
        num_heads=2,
        num_kv_heads=1,
        q_len=704,
        kv_len=704,
        head_dim=64,
        value_dim=64,
    ),
    Case(
        "size-2047", Causal(), batch=1, num_heads=1, num_kv_heads=1, q_len=2047, kv_len=2047, head_dim=64, value_dim=64
    ),
    Case(
        "size-32-heads",
        Causal(),
        batch=1,
        num_heads=32,
        num_kv_heads=8,
        q_len=130,
        kv_len=130,
        head_dim=64,
        value_dim=64,
    ),
    Case("size-decode", None, batch=2, num_heads=32, num_kv_heads=4, q_len=1, kv_len=2047, head_dim=64, value_dim=64),
    Case(
        "size-few-queries",
        Causal(),
        batch=2,
        num_heads=4,
        num_kv_heads=1,
        q_len=5,
        kv_len=704,
        head_dim=128,
        value_dim=128,
    ),
    Case(
        "size-extend", Causal(), batch=1, num_heads=4, num_kv_heads=2, q_len=65, kv_len=257, head_dim=64, value_dim=64
    ),
)
