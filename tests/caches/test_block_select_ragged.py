"""BlockSelectCache with padding: a text has its budget in tokens, wherever its padding stands."""

import math

import pytest
import torch
from torch import Tensor

from saccade import masks
from saccade.caches import BlockSelectCache, KVCache, padded_positions
from saccade.mechanisms import Softmax
from saccade.positions import ALiBi
from saccade.testing import oracle

HEADS, KV_HEADS, DIM, SIZE, BUDGET = 4, 2, 4, 4, 16
CAUSAL = masks.Causal()
PROMPTS = {
    "left": padded_positions([31, 9], side="left"),
    "right": padded_positions([31, 9], side="right"),
    "scattered": torch.stack([torch.arange(31), torch.where(torch.arange(31) % 4 == 1, torch.arange(31) // 4, -1)]),
}


def _qkv(length: int) -> list[Tensor]:
    return [torch.randn(2, heads, length, DIM, dtype=torch.float64) for heads in (HEADS, KV_HEADS, KV_HEADS)]


def _read(q: Tensor, k: Tensor, table: Tensor, ends: tuple[int, int]) -> Tensor:
    """Return the columns that the last query reads by definition, bool [batch, kv_heads, columns]."""
    finished = (table.shape[1] - 1) // SIZE
    read = torch.zeros(2, KV_HEADS, table.shape[1], dtype=torch.bool)
    read[:, :, finished * SIZE :] = True
    for b in range(2):
        blocks = [range(n * SIZE, (n + 1) * SIZE) for n in range(finished)]
        real = [[j for j in block if table[b, j] >= 0] for block in blocks]
        some = [n for n in range(finished) if real[n]]
        first, last = some[: ends[0]], some[max(0, len(some) - ends[1] + 1) :]
        left = BUDGET - int((table[b, finished * SIZE :] >= 0).sum())
        for g in range(KV_HEADS):
            scores = torch.full((2, finished), -math.inf, dtype=torch.float64)
            for n in some:
                low, high = k[b, g, real[n]].amin(0), k[b, g, real[n]].amax(0)
                own = q[b, g * 2 : g * 2 + 2, -1]
                scores[:, n] = torch.maximum(own * low, own * high).sum(-1) * DIM**-0.5
            rank = scores.log_softmax(-1).amax(0)
            order = sorted(some, key=lambda n, rank=rank: (n not in (*first, *last), -float(rank[n])))
            room = left
            for n in order:
                room -= len(real[n])
                if room < 0:
                    break
                read[b, g, list(blocks[n])] = True
    return read


@pytest.mark.parametrize("ends", [(1, 2), (0, 1), (1, 3)], ids=str)
@pytest.mark.parametrize("prompt", PROMPTS)
def test_a_step_reads_as_many_tokens_of_each_item_as_the_budget_holds(prompt: str, ends: tuple[int, int]) -> None:
    torch.manual_seed(0)
    q, k, v = _qkv(42)
    cache, table = BlockSelectCache(SIZE, BUDGET, sink_blocks=ends[0], local_blocks=ends[1]), PROMPTS[prompt]
    cache.attend(Softmax(), q[:, :, :31], k[:, :, :31], v[:, :, :31], mask=CAUSAL, positions=table)
    for n in range(31, 42):
        new = table.amax(1, keepdim=True) + 1
        if n == 36:
            new[0] = -1  # an item that pauses
        table = torch.cat([table, new], 1)
        out = cache.attend(Softmax(), *(x[:, :, n : n + 1] for x in (q, k, v)), mask=CAUSAL, positions=new)
        read = _read(q[:, :, : n + 1], k, table, ends)
        seen = read & (table >= 0)[:, None] & (new >= 0)[:, None]
        assert int(seen.sum(2).max()) <= BUDGET
        expected, _ = oracle.attention(
            q[:, :, n : n + 1], k[:, :, : n + 1], v[:, :, : n + 1], seen.repeat_interleave(2, 1)[:, :, None]
        )
        torch.testing.assert_close(out, expected)


@pytest.mark.parametrize("mechanism", [Softmax(), Softmax(bias=ALiBi(HEADS))], ids=["plain", "alibi"])
@pytest.mark.parametrize("prompt", PROMPTS)
def test_a_text_within_the_budget_is_dense_beside_a_longer_one(prompt: str, mechanism: Softmax) -> None:
    q, k, v = _qkv(45)
    cache, dense, table = BlockSelectCache(SIZE, BUDGET), KVCache(), PROMPTS[prompt]
    for one in (cache, dense):
        one.attend(mechanism, q[:, :, :31], k[:, :, :31], v[:, :, :31], mask=CAUSAL, positions=table)
    held, differs = int(table[1].max()) + 1, False
    for n in range(31, 45):
        held += 1
        new = [x[:, :, n : n + 1] for x in (q, k, v)]
        mine, full = (one.attend(mechanism, *new, mask=CAUSAL) for one in (cache, dense))
        if held <= BUDGET:
            torch.testing.assert_close(mine[1], full[1])
        else:
            differs |= bool((mine[1] - full[1]).abs().max() > 1e-4)
        assert bool((mine[0] - full[0]).abs().max() > 1e-6)
    assert differs


def test_after_a_prompt_of_padding_alone_steps_read_what_came_since() -> None:
    q, k, v = _qkv(40)
    cache, dense = BlockSelectCache(SIZE, BUDGET), KVCache()
    for one in (cache, dense):
        one.attend(Softmax(), q[:, :, :32], k[:, :, :32], v[:, :, :32], mask=CAUSAL, positions=torch.full((2, 32), -1))
    for n in range(32, 40):
        new = [x[:, :, n : n + 1] for x in (q, k, v)]
        mine, full = (one.attend(Softmax(), *new, mask=CAUSAL) for one in (cache, dense))
        torch.testing.assert_close(mine, full)
