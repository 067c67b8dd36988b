"""BlockSelectCache: how often blocks are ranked, and what a step reads between two rankings."""

import pytest
import torch
from tests.caches.test_block_select import CAUSAL, DIM, KV_HEADS, SIZE, _filled, _hidden, _qkv, _step
from torch import Tensor

from saccade.caches import BlockSelectCache
from saccade.mechanisms import Softmax
from saccade.scorers import BlockBounds
from saccade.testing import oracle


class Counting(BlockBounds):
    """Counts how often it is asked."""

    asked = 0

    def score(self, query: Tensor, summary: Tensor) -> Tensor:
        self.asked += 1
        return super().score(query, summary)


@pytest.mark.parametrize("every", [2, 3])
def test_a_ranking_is_read_again_in_as_many_steps_as_was_said(every: int) -> None:
    scorer = Counting()
    cache, qkv = _filled(scorer=scorer, rescore_every=every)
    for n in range(31, 37):
        _step(cache, qkv, n)
    assert scorer.asked == 6 // every


def test_a_ranking_goes_with_a_fork_and_not_with_what_is_cropped() -> None:
    scorer = Counting()
    cache, qkv = _filled(scorer=scorer, rescore_every=3)
    for n in range(31, 38):
        _step(cache, qkv, n)
    assert scorer.asked == 3
    fork = cache.fork()
    fork.reorder([1, 0])
    torch.testing.assert_close(_step(fork, qkv, 38, [1, 0]), _step(cache, qkv, 38)[[1, 0]])
    cache.crop(35)
    _step(cache, qkv, 35)
    assert scorer.asked == 4


def test_between_two_rankings_newer_blocks_come_last() -> None:
    """With one block at the end, a block that is finished between two rankings has no other claim."""
    q, k, v = _qkv(47)
    cache = BlockSelectCache(SIZE, 12, sink_blocks=0, local_blocks=1, rescore_every=6)
    cache.attend(Softmax(), *(x[:, :, :30] for x in (q, k, v)), mask=CAUSAL)
    for n in range(30, 47):
        out = cache.attend(Softmax(), *(x[:, :, n : n + 1] for x in (q, k, v)), mask=CAUSAL)
        asked = n - n % 6
        known = _hidden(q[:, :, : asked + 1], k[:, :, : asked + 1], CAUSAL, "bound", 12, (0, 1))
        read = torch.zeros(2, KV_HEADS, n + 1, dtype=torch.bool)
        read[:, :, : asked // SIZE * SIZE] = known[:, :, : asked // SIZE * SIZE]
        read[:, :, n // SIZE * SIZE :] = True
        expected, _ = oracle.attention(
            q[:, :, n : n + 1], k[:, :, : n + 1], v[:, :, : n + 1], read.repeat_interleave(2, 1)[:, :, None]
        )
        torch.testing.assert_close(out, expected)
        ranked = n // SIZE * 2 * DIM if n == asked else (n - 1) // SIZE  # summaries, or the last ranking
        columns = 2 * SIZE + n % SIZE + 1
        assert cache.traffic.bytes_read == 2 * KV_HEADS * 8 * (columns * 2 * DIM + ranked)
        assert cache.exact_len == 30
