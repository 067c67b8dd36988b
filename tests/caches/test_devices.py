"""Caches make their tensors on the device of the keys, not on torch's default device."""

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from tests.caches import cache_kinds

from saccade import masks
from saccade.caches import (
    BlockSelectCache,
    CompressiveCache,
    LayerCache,
    RecurrentCache,
    load_cache,
    padded_positions,
    save_cache,
)
from saccade.mechanisms import CompressiveMemory, Linear, Mechanism, Softmax
from saccade.positions import ALiBi

CAUSAL = masks.Causal()
KINDS: dict[str, Callable[[], LayerCache]] = cache_kinds.KINDS | {
    "sums": RecurrentCache,
    "remembered": CompressiveCache,
    "sparse": lambda: BlockSelectCache(2, 6, prompt="sparse"),
}
MECHANISMS: dict[str, Mechanism] = {"sums": Linear(), "remembered": CompressiveMemory(4, 3)}
PLAIN = ("turned", *MECHANISMS, "sparse")


@pytest.mark.parametrize(
    "kind, how",
    [
        (kind, how)
        for kind in KINDS
        for how in ("plain", "ragged", "alibi", "by head")
        if how == "plain" or kind not in PLAIN or (how == "ragged" and kind != "sparse")
    ],
)
def test_a_default_device_changes_nothing(kind: str, how: str, tmp_path: Path) -> None:
    mechanism = MECHANISMS.get(kind, Softmax(bias=ALiBi(4)) if how == "alibi" else Softmax())
    by_head = masks.Predicate(lambda b, h, q, kv: (kv <= q) & ((q + kv + h + b) % 3 != 0))
    rule, first = by_head if how == "by head" else CAUSAL, padded_positions([12, 7], side="left")
    parts = [[torch.randn(2, heads, length, 4) for heads in (4, 2, 2)] for length in (12, 1, 1, 3, 1)]
    outs = []
    for device in ("cpu", "meta"):
        cache = KINDS[kind]()
        with torch.device(device):
            for i, part in enumerate(parts):
                where = first if how == "ragged" and not i else None
                outs.append(cache.attend(mechanism, *part, mask=rule, positions=where))
                cache.reorder([1, 0])
            save_cache(cache, tmp_path / "cache")
            cache = load_cache(tmp_path / "cache")
            outs.append(cache.attend(mechanism, *parts[1], mask=rule))
    for own, expected in zip(outs[len(parts) + 1 :], outs, strict=False):
        assert own.device.type == "cpu"
        torch.testing.assert_close(own, expected)
