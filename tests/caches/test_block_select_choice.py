"""Tests of the blocks that a step of BlockSelectCache reads under all kinds of rules, against plain loops."""

import itertools
import math
from pathlib import Path

import pytest
import torch
from torch import Tensor

from saccade import masks
from saccade.caches import BlockSelectCache, load_cache, padded_positions, save_cache
from saccade.mechanisms import Softmax
from saccade.positions import ALiBi
from saccade.scorers import BlockBounds, BlockScorer

CAUSAL, SIZE, DIM = masks.Causal(), 4, 4
RULES: dict[str, masks.Mask] = {
    "near": masks.sliding_window(17),
    "few": CAUSAL & (masks.Window(2, 0) | masks.Prefix(3)),
    "own documents": masks.Documents([6, 60], rule=CAUSAL),
    "by head": masks.Predicate(lambda b, h, q, kv: (kv <= q) & ((kv // SIZE + h + b) % 3 != 0)),
    "by item": CAUSAL & masks.Dense(torch.arange(50).view(1, 1, 1, 50) // SIZE % 4 != torch.arange(3).view(3, 1, 1, 1)),
}


def _qkv(length: int, heads: tuple[int, int], batch: int = 3) -> list[Tensor]:
    return [torch.randn(batch, own, length, DIM, dtype=torch.float64) for own in (*heads, heads[1])]


def _steps(cache: BlockSelectCache, mechanism: Softmax, qkv: list[Tensor], prompt: int, **how: object) -> list[Tensor]:
    edges, rule = [0, *range(prompt, qkv[0].shape[2] + 1)], how.pop("mask", CAUSAL)
    outs = []
    for start, stop in itertools.pairwise(edges):
        outs.append(
            cache.attend(mechanism, *(x[:, :, start:stop] for x in qkv), mask=rule, **(how if not start else {}))
        )
    return outs[1:]


def _read(q: Tensor, k: Tensor, allowed: Tensor, budget: int, ends: tuple[int, int]) -> Tensor:
    """Return the columns that the last query reads among those allowed, bool ``[batch, kv_heads, columns]``."""
    (batch, heads, length), kv_heads = allowed.shape, k.shape[1]
    finished, group = (length - 1) // SIZE, heads // kv_heads
    read = torch.zeros(batch, kv_heads, length, dtype=torch.bool)
    read[:, :, finished * SIZE :] = True
    for b, g in itertools.product(range(batch), range(kv_heads)):
        own, blocks = range(g * group, (g + 1) * group), k[b, g, : finished * SIZE].unflatten(0, (-1, SIZE))
        bounds = [torch.maximum(q[b, h, -1] * blocks.amin(1), q[b, h, -1] * blocks.amax(1)).sum(1) for h in own]
        best = torch.stack([(bound * DIM**-0.5).log_softmax(0) for bound in bounds]).amax(0).tolist()
        seen = [n for n in range(finished) if bool(allowed[b, list(own), n * SIZE : (n + 1) * SIZE].any())]
        first, last = range(ends[0]), range(finished - ends[1] + 1, finished)
        seen.sort(key=lambda n, first=first, last=last, best=best: (n not in first and n not in last, -best[n]))
        for n in seen[: budget // SIZE - 1]:
            read[b, g, n * SIZE : (n + 1) * SIZE] = True
    return read


@pytest.mark.parametrize("heads", [(4, 2), (2, 1), (2, 2)], ids=str)
@pytest.mark.parametrize("rule", RULES)
def test_a_step_reads_the_best_of_the_blocks_that_it_may_see(rule: str, heads: tuple[int, int]) -> None:
    torch.manual_seed(1)
    (q, k, v), mask, ends = _qkv(38, heads), RULES[rule], (1, 1)
    cache = BlockSelectCache(SIZE, 16, sink_blocks=1, local_blocks=1)
    outs = _steps(cache, Softmax(), [q, k, v], 26, mask=mask)
    table = mask.to_dense(38, batch=3, heads=heads[0]).expand(3, heads[0], 38, 38)
    for n, out in enumerate(outs, 26):
        allowed = table[:, :, n, : n + 1]
        read = _read(q[:, :, : n + 1], k[:, :, : n + 1], allowed, 16, ends).repeat_interleave(heads[0] // heads[1], 1)
        hide = masks.Predicate(lambda b, h, q, kv, read=read & allowed: read[b, h, kv])
        full = Softmax()(q[:, :, n : n + 1], k[:, :, : n + 1], mask=hide)
        torch.testing.assert_close(out, full @ v[:, :, : n + 1])


@pytest.mark.parametrize("mechanism", [Softmax(bias=ALiBi(4)), Softmax()], ids=["alibi", "plain"])
def test_tokens_that_begin_elsewhere_read_the_same(mechanism: Softmax) -> None:
    qkv, runs = _qkv(40, (4, 2)), []
    for first in (0, 100):
        cache = BlockSelectCache(SIZE, 16)
        runs.append(
            _steps(cache, mechanism, qkv, 31, mask=masks.sliding_window(25), positions=range(first, first + 31))
        )
        cache = BlockSelectCache(SIZE, 16)
        runs[-1] += _steps(cache, mechanism, qkv, 31, positions=range(first, first + 31))
    for own, expected in zip(runs[1], runs[0], strict=True):
        torch.testing.assert_close(own, expected)


@pytest.mark.parametrize("budget", [12, 16, 20])
def test_the_first_step_beyond_the_budget_leaves_blocks_out(budget: int) -> None:
    cache, qkv = BlockSelectCache(SIZE, budget), _qkv(budget + 1, (4, 2))
    _steps(cache, Softmax(), qkv, budget)
    token = 3 * 2 * DIM * 8 * 2
    summaries = 3 * 2 * (budget // SIZE) * 2 * DIM * 8
    assert cache.traffic == ((budget - SIZE + 1) * token + summaries, token)
    assert cache.exact_len == budget


def test_items_of_a_ragged_batch_read_no_block_for_nothing() -> None:
    """Each item reads as many blocks as its budget holds, and the table is as wide as the largest number of blocks."""
    positions = torch.stack([torch.arange(31), torch.where(torch.arange(31) % 4 == 1, torch.arange(31) // 4, -1)])
    token, summaries = 2 * 2 * DIM * 8 * 2, 2 * 2 * 7 * 2 * DIM * 8
    for ragged, blocks in ((positions, 7), (padded_positions([31, 9], side="left"), 3)):
        cache = BlockSelectCache(SIZE, 16)
        _steps(cache, Softmax(), _qkv(32, (4, 2), batch=2), 31, positions=ragged)
        assert cache.traffic.bytes_read == (blocks * SIZE + 4) * token + summaries


@pytest.mark.parametrize("side", ["left", "right"])
def test_summaries_are_those_of_the_tokens_and_of_no_padding(side: str) -> None:
    (q, k, v), lengths = _qkv(32, (4, 2)), [31, 9, 26]
    positions, cache = padded_positions(lengths, side=side), BlockSelectCache(SIZE, 16)
    _steps(cache, Softmax(), [q, k, v], 31, positions=positions)
    assert cache.summary is not None
    assert cache.summary.shape == (3, 2, 7, 2 * DIM)
    table = torch.cat([positions, torch.tensor(lengths)[:, None]], 1)
    for b, g, n in itertools.product(range(3), range(2), range(7)):
        real = k[b, g, n * SIZE : (n + 1) * SIZE][table[b, n * SIZE : (n + 1) * SIZE] >= 0]
        expected = torch.cat([real.amax(0), real.amin(0)]) if len(real) else torch.zeros(2 * DIM, dtype=torch.float64)
        torch.testing.assert_close(cache.summary[b, g, n], expected, atol=0, rtol=0)


class Told(BlockScorer):
    """A scorer that returns given scores, in a narrow type."""

    def __init__(self, scores: Tensor):
        self.scores = scores

    def summarize(self, key: Tensor, real: Tensor) -> Tensor:
        return key.mean(3)

    def score(self, query: Tensor, summary: Tensor) -> Tensor:
        return self.scores[:, :, : summary.shape[2]]


def test_scores_in_a_narrow_type_are_set_against_one_another_in_a_wide_one() -> None:
    scores = torch.stack([torch.randperm(120).view(2, 60) / 32 for _ in range(20)]).bfloat16()
    scores[:, :, 7] = 200.0  # beside which the others are small, and near one another
    cache = BlockSelectCache(SIZE, 21 * SIZE, sink_blocks=0, local_blocks=1, scorer=Told(scores))
    q, k, v = (torch.randn(20, heads, 241, DIM).bfloat16() for heads in (2, 1, 1))
    (out,) = _steps(cache, Softmax(), [q, k, v], 240)
    best = (scores.double() * DIM**-0.5).log_softmax(-1).amax(1).topk(20, 1).indices
    read = torch.zeros(20, 60, dtype=torch.bool).scatter(1, best, True).repeat_interleave(SIZE, 1)
    read = torch.cat([read, torch.ones(20, 1, dtype=torch.bool)], 1)[:, None, None]
    weights = (q.double()[:, :, 240:] @ k.double().mT * DIM**-0.5).masked_fill(~read, -math.inf).softmax(-1)
    torch.testing.assert_close(out.double(), weights @ v.double(), atol=4e-3, rtol=1e-2)


@pytest.mark.parametrize("axis", [0, 1, 2], ids=["batch", "heads", "blocks"])
def test_summaries_of_another_size_are_refused(axis: int) -> None:
    class Fewer(BlockBounds):
        def summarize(self, key: Tensor, real: Tensor) -> Tensor:
            return super().summarize(key, real).narrow(axis, 0, 1)

    qkv, cache = _qkv(32, (4, 2)), BlockSelectCache(SIZE, 16, scorer=Fewer())
    cache.attend(Softmax(), *(x[:, :, :31] for x in qkv), mask=CAUSAL)
    with pytest.raises(ValueError, match=r"BlockSelectCache\.attend: summary must .* = \[3, 2, 7, width\]; got "):
        cache.attend(Softmax(), *(x[:, :, 31:] for x in qkv), mask=CAUSAL)
    with pytest.raises(ValueError, match="sink_blocks must be an int of at least 0; got -1"):
        BlockSelectCache(SIZE, 16, sink_blocks=-1)


def test_pairs_of_tokens_and_single_ones_read_alike_in_a_sparse_prompt(tmp_path: Path) -> None:
    qkv = _qkv(40, (4, 2))
    steps, pairs = (BlockSelectCache(SIZE, 16, prompt=prompt) for prompt in ("dense", "sparse"))
    expected = torch.cat(_steps(steps, Softmax(), qkv, 4), 2)
    edges = [0, 4, 5, 7, *range(8, 40, 2), 39, 40]
    parts = [slice(start, stop) for start, stop in itertools.pairwise(edges)]
    own = [pairs.attend(Softmax(), *(x[:, :, part] for x in qkv), mask=CAUSAL) for part in parts]
    torch.testing.assert_close(torch.cat(own, 2)[:, :, 4:], expected)
    assert pairs.traffic == steps.traffic
    assert pairs.exact_len == steps.exact_len == 16
    short = BlockSelectCache(SIZE, 16, prompt="sparse")
    short.attend(Softmax(), *(x[:, :, :5] for x in qkv), mask=CAUSAL)
    save_cache(short, tmp_path / "cache")
    assert load_cache(tmp_path / "cache").exact_len == 5


def test_a_sparse_prompt_may_begin_with_less_than_a_block() -> None:
    qkv, short, dense = _qkv(30, (4, 2)), *(BlockSelectCache(SIZE, 16, prompt=prompt) for prompt in ("sparse", "dense"))
    expected = torch.cat(_steps(dense, Softmax(), qkv, 2), 2)
    parts = [slice(start, stop) for start, stop in itertools.pairwise([0, 2, 3, 16, 30])]
    own = [short.attend(Softmax(), *(x[:, :, part] for x in qkv), mask=CAUSAL) for part in parts]
    torch.testing.assert_close(torch.cat(own, 2)[:, :, 2:], expected)
