"""Calls of no tokens and of no items: nothing comes out, nothing is remembered, and the cache goes on as before."""

import pytest
import torch
from tests.caches.cache_kinds import KINDS
from torch import Tensor

from saccade import masks
from saccade.caches import padded_positions
from saccade.mechanisms import Softmax

CAUSAL = masks.Causal()
PLACES: dict[str, range | Tensor | None] = {
    "none": None,
    "a range": range(3, 3),
    "a row": torch.empty(0, dtype=torch.int64),
    "a table": torch.empty(2, 0, dtype=torch.int64),
}
MECHANISMS = {"plain": Softmax(), "capped": Softmax(softcap=3.0)}


def _qkv(length: int, batch: int = 2) -> list[Tensor]:
    return [torch.randn(batch, heads, length, 4) for heads in (4, 2, 2)]


@pytest.mark.parametrize("where", PLACES)
@pytest.mark.parametrize("name", MECHANISMS)
@pytest.mark.parametrize("kind", KINDS)
def test_a_call_of_no_tokens_changes_nothing(kind: str, name: str, where: str) -> None:
    qkv, cache, plain = _qkv(16), KINDS[kind](), KINDS[kind]()
    for start, stop in ((0, 0), (0, 12), (12, 12), (12, 13), (13, 13), (13, 16), (16, 16)):
        own = PLACES[where] if start == stop else None
        out = cache.attend(MECHANISMS[name], *(x[:, :, start:stop] for x in qkv), mask=CAUSAL, positions=own)
        assert out.shape == (2, 4, stop - start, 4)
        if stop > start:
            expected = plain.attend(MECHANISMS[name], *(x[:, :, start:stop] for x in qkv), mask=CAUSAL)
            torch.testing.assert_close(out, expected)
        assert (cache.length, cache.positions(1)) == (stop, range(stop, stop + 1))


@pytest.mark.parametrize("name", MECHANISMS)
@pytest.mark.parametrize("kind", KINDS)
def test_an_empty_batch_continues(kind: str, name: str) -> None:
    first, ended = KINDS[kind](), KINDS[kind]()
    ended.attend(MECHANISMS[name], *_qkv(12), mask=CAUSAL)
    ended.reorder([])
    for cache, lengths in ((first, (12, 1, 3, 0)), (ended, (1, 3, 0, 1))):
        for length in lengths:
            out = cache.attend(MECHANISMS[name], *_qkv(length, 0), mask=CAUSAL)
            assert out.shape == (0, 4, length, 4)


@pytest.mark.parametrize("kind", KINDS)
def test_a_ragged_batch_without_items_continues(kind: str) -> None:
    cache = KINDS[kind]()
    cache.attend(Softmax(), *_qkv(12), mask=CAUSAL, positions=padded_positions([12, 7], side="left"))
    cache.attend(Softmax(), *_qkv(0), mask=CAUSAL)
    cache.reorder([])
    for length in (1, 3, 0, 1):
        assert cache.attend(Softmax(), *_qkv(length, 0), mask=CAUSAL).shape == (0, 4, length, 4)


@pytest.mark.parametrize("name", MECHANISMS)
@pytest.mark.parametrize("kind", KINDS)
def test_values_of_no_width_come_out_as_such(kind: str, name: str) -> None:
    (q, k, _), cache = _qkv(16), KINDS[kind]()
    for start, stop in ((0, 12), (12, 13), (13, 14), (14, 16)):
        own = [x[:, :, start:stop] for x in (q, k, k[..., :0])]
        assert cache.attend(MECHANISMS[name], *own, mask=CAUSAL).shape == (2, 4, stop - start, 0)
