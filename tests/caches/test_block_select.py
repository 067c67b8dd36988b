"""BlockSelectCache: within the budget it is a KVCache; beyond it, the dense run in which other blocks are hidden."""

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from saccade import masks, tasks
from saccade.caches import BlockSelectCache, KVCache, padded_positions
from saccade.mechanisms import Linear, Softmax
from saccade.nn import MultiHeadAttention
from saccade.positions import ALiBi, Rotary
from saccade.scorers import BlockBounds, BlockMeans, BlockScorer
from saccade.scores import Additive
from saccade.testing import oracle

HEADS, KV_HEADS, DIM, SIZE = 4, 2, 4, 4
CAUSAL = masks.Causal()
RULES = [
    CAUSAL,
    masks.sliding_window(17),
    CAUSAL & ~masks.Window(1, 0),
    masks.Documents([6, 60], rule=CAUSAL),
    masks.Predicate(lambda b, h, q, kv: (kv <= q) & ((q + kv + h) % 3 != 0)),
]


class Everything(BlockScorer):
    """Ranks by the keys themselves: the best that a ranking by single keys could be."""

    def summarize(self, key: Tensor, real: Tensor) -> Tensor:
        return key.masked_fill(~real, 0.0).flatten(3)

    def score(self, query: Tensor, summary: Tensor) -> Tensor:
        _, heads, width = query.shape
        keys = summary.unflatten(3, (-1, width)).repeat_interleave(heads // summary.shape[1], 1)
        return torch.einsum("bhd,bhnsd->bhns", query, keys).amax(-1)


def _mean(query: Tensor, block: Tensor) -> Tensor:
    return query @ block.mean(0)


def _bound(query: Tensor, block: Tensor) -> Tensor:
    return torch.maximum(query * block.amin(0), query * block.amax(0)).sum()


def _largest(query: Tensor, block: Tensor) -> Tensor:
    return (block @ query).amax()


SCORERS = {"mean": (BlockMeans(), _mean), "bound": (BlockBounds(), _bound), "own": (Everything(), _largest)}
MECHANISMS = {
    "plain": Softmax,
    "softcap": lambda: Softmax(softcap=2.0, scale=0.7),
    "alibi": lambda: Softmax(bias=ALiBi(HEADS)),
    "sink": lambda: Softmax(sink_logit=torch.arange(HEADS) / 2),
    "additive": lambda: Softmax(score=Additive(DIM, DIM, 6)),
}


def _qkv(length: int, batch: int = 2) -> list[Tensor]:
    return [torch.randn(batch, heads, length, DIM, dtype=torch.float64) for heads in (HEADS, KV_HEADS, KV_HEADS)]


def _hidden(q: Tensor, k: Tensor, rule: masks.Mask, name: str, budget: int, ends: tuple[int, int]) -> Tensor:
    """Return the keys that the last query reads by definition, bool [batch, kv_heads, keys]."""
    batch, _, length, _ = k.shape
    finished = (length - 1) // SIZE
    sinks, local = ends
    allowed = rule.to_dense(length, batch=batch, heads=HEADS)[:, :, -1].expand(batch, HEADS, length)
    read = torch.zeros(batch, KV_HEADS, length, dtype=torch.bool)
    for b in range(batch):
        for g in range(KV_HEADS):
            own = range(g * HEADS // KV_HEADS, (g + 1) * HEADS // KV_HEADS)
            each = torch.stack(
                [
                    torch.stack(
                        [SCORERS[name][1](q[b, h, -1], k[b, g, n * SIZE : (n + 1) * SIZE]) for n in range(finished)]
                    )
                    for h in own
                ]
            )
            rank = (each * DIM**-0.5).log_softmax(-1).amax(0)
            rank[:sinks] = rank[finished - (local - 1) :] = math.inf
            seen = torch.stack([allowed[b, list(own), n * SIZE : (n + 1) * SIZE].any() for n in range(finished)])
            rank = rank.masked_fill(~seen, -math.inf)
            for n in rank.argsort(descending=True)[: budget // SIZE - 1].tolist():
                read[b, g, n * SIZE : (n + 1) * SIZE] = True
    read[:, :, finished * SIZE :] = True
    return read


@pytest.mark.ci
@settings(deadline=None, max_examples=10)
@given(st.data())
def test_a_step_is_the_dense_run_in_which_other_blocks_are_hidden(data: st.DataObject) -> None:
    torch.manual_seed(data.draw(st.integers(0, 99)))
    rule = data.draw(st.sampled_from(RULES))
    name = data.draw(st.sampled_from(sorted(SCORERS)))
    mechanism = MECHANISMS[data.draw(st.sampled_from(sorted(MECHANISMS)))]().double()
    ends = data.draw(st.sampled_from([(1, 2), (0, 1), (2, 3)]))
    budget = SIZE * data.draw(st.integers(max(2, sum(ends)), 6))
    q, k, v = _qkv(34)
    cache = BlockSelectCache(SIZE, budget, sink_blocks=ends[0], local_blocks=ends[1], scorer=SCORERS[name][0])
    prompt = data.draw(st.sampled_from([1, 22, 26, 31]))
    with torch.no_grad():
        out = cache.attend(mechanism, q[:, :, :prompt], k[:, :, :prompt], v[:, :, :prompt], mask=rule)
        torch.testing.assert_close(out, mechanism(q[:, :, :prompt], k[:, :, :prompt], mask=rule) @ v[:, :, :prompt])
        for n in range(prompt, 34):
            stop = n + 1
            out = cache.attend(mechanism, *(x[:, :, n:stop] for x in (q, k, v)), mask=rule)
            kept = torch.ones(2, KV_HEADS, stop, dtype=torch.bool)
            if stop > budget:
                kept = _hidden(q[:, :, :stop], k[:, :, :stop], rule, name, budget, ends)
            table = kept.repeat_interleave(HEADS // KV_HEADS, 1)
            hide = masks.Predicate(lambda b, h, q, kv, table=table: table[b, h, kv])
            full = mechanism(q[:, :, n:stop], k[:, :, :stop], mask=rule & hide)
            torch.testing.assert_close(out, full @ v[:, :, :stop])


def test_the_plainest_case_is_the_definition() -> None:
    q, k, v = _qkv(21)
    cache = BlockSelectCache(SIZE, 12)
    cache.attend(Softmax(), q[:, :, :20], k[:, :, :20], v[:, :, :20], mask=CAUSAL)
    out = cache.attend(Softmax(), q[:, :, 20:], k[:, :, 20:], v[:, :, 20:], mask=CAUSAL)
    kept = _hidden(q, k, CAUSAL, "bound", 12, (1, 2)).repeat_interleave(2, 1)[:, :, None]
    expected, _ = oracle.attention(q[:, :, 20:], k, v, kept)
    torch.testing.assert_close(out, expected)


@settings(deadline=None, max_examples=20)
@given(st.data())
def test_a_budget_for_everything_is_dense_exactly(data: st.DataObject) -> None:
    torch.manual_seed(1)
    name = data.draw(st.sampled_from(["plain", "alibi", "sink"]))
    mha = MultiHeadAttention(
        16,
        HEADS,
        num_kv_heads=2,
        mask=data.draw(st.sampled_from(RULES)),
        mechanism=MECHANISMS[name](),
        rotary=Rotary(4),
    )
    mha = mha.double().eval().requires_grad_(False)
    x = torch.randn(3, 30, 16, dtype=torch.float64)
    positions = padded_positions([12, 5, 9], side=data.draw(st.sampled_from(["left", "right"])))
    budget = SIZE * 8
    mine, dense = BlockSelectCache(SIZE, budget), KVCache()
    for one in (mine, dense):
        one.out = [mha(x[:, :12], cache=one, positions=positions if data is not None else None)]
    for size in [1, 1, 3, 1, 1, 5, 1, 1, 1]:
        start = mine.length
        for one in (mine, dense):
            one.out.append(mha(x[:, start : start + size], cache=one))
    for own, full in zip(mine.out, dense.out, strict=True):
        torch.testing.assert_close(own, full, atol=0, rtol=0)
    assert mine.length == 27


@pytest.mark.parametrize("name", ["plain", "alibi"])
def test_items_of_a_ragged_batch_read_as_many_blocks_that_hold_tokens(name: str) -> None:
    """Padding fills whole blocks here, so that blocks of each item alone are the same."""
    mha = MultiHeadAttention(16, HEADS, num_kv_heads=2, mask=CAUSAL, mechanism=MECHANISMS[name](), rotary=Rotary(4))
    mha = mha.double().eval().requires_grad_(False)
    x = torch.randn(2, 50, 16, dtype=torch.float64)
    lengths = [36, 24]
    positions = padded_positions(lengths, side="left")
    padded = torch.full((2, 36, 16), 9.0, dtype=torch.float64)
    for b, length in enumerate(lengths):
        padded[b, positions[b] >= 0] = x[b, :length]
    cache = BlockSelectCache(SIZE, 20)
    mha(padded, positions=positions, cache=cache)
    alone = [BlockSelectCache(SIZE, 20) for _ in lengths]
    for b, length in enumerate(lengths):
        mha(x[b : b + 1, :length], cache=alone[b])
    for step in range(9):
        new = torch.stack([x[b, length + step] for b, length in enumerate(lengths)])[:, None]
        out = mha(new, cache=cache)
        expected = torch.cat([mha(new[b : b + 1], cache=alone[b]) for b in range(2)])
        torch.testing.assert_close(out, expected)


def test_the_bound_is_never_too_low_and_padding_does_not_count() -> None:
    scorer = BlockBounds()
    for seed in range(20):
        torch.manual_seed(seed)
        key, query = torch.randn(2, 2, 5, SIZE, DIM) + torch.randn(DIM), torch.randn(2, HEADS, DIM)
        real = torch.rand(2, 1, 5, SIZE, 1) > 0.4
        key = key.masked_fill(~real, 1e4)
        bound = scorer.score(query, scorer.summarize(key, real))
        true = torch.einsum("bhd,bhnsd->bhns", query, key.repeat_interleave(2, 1))
        true = true.masked_fill(~real[..., 0], -math.inf).amax(-1)
        assert bool((bound >= true - 1e-4).all())
        assert bool((bound < 1e3).all())
        mean = BlockMeans().summarize(key, real)
        assert bool((mean.abs() < 1e3).all())


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16])
def test_scorers_are_the_book_over_the_tokens_that_are_there(dtype: torch.dtype) -> None:
    key, query = torch.randn(2, 2, 5, SIZE, DIM).to(dtype), torch.randn(2, HEADS, DIM).to(dtype)
    real = torch.rand(2, 1, 5, SIZE, 1) > 0.4
    real[0, 0, 0], real[1, 0, 3] = False, True
    for scorer, rule in list(SCORERS.values())[:2]:
        summary = scorer.summarize(key, real)
        scores = scorer.score(query, summary)
        assert summary.dtype == dtype
        assert scores.shape == (2, HEADS, 5)
        for b, h, n in torch.cartesian_prod(*map(torch.arange, scores.shape)).tolist():
            block = key[b, h // 2, n][real[b, 0, n, :, 0]].double()
            expected = rule(query[b, h].double(), block) if len(block) else torch.zeros((), dtype=torch.float64)
            eps = 1e-12 if dtype == torch.float64 else 0.05
            torch.testing.assert_close(scores[b, h, n].double(), expected, atol=eps, rtol=eps)


def _filled(length: int = 31, **how: object) -> tuple[BlockSelectCache, list[Tensor]]:
    q, k, v = _qkv(length + 12)
    cache = BlockSelectCache(SIZE, 20, **how)
    cache.attend(Softmax(), q[:, :, :length], k[:, :, :length], v[:, :, :length], mask=CAUSAL)
    return cache, [q, k, v]


def _step(cache: BlockSelectCache, qkv: list[Tensor], n: int, rows: list[int] | None = None) -> Tensor:
    rows = [0, 1] if rows is None else rows
    return cache.attend(Softmax(), *(x[rows, :, n : n + 1] for x in qkv), mask=CAUSAL)


def test_summaries_are_those_of_the_keys_after_whatever_was_done() -> None:
    cache, qkv = _filled()
    steps = iter(range(31, 37))

    def check(own: BlockSelectCache) -> None:
        assert own.key is not None
        assert own.summary is not None
        blocks = own.key[:, :, : own.summary.shape[2] * SIZE].unflatten(2, (-1, SIZE))
        assert own.summary.shape[2] >= own.length // SIZE - 1
        torch.testing.assert_close(own.summary, torch.cat([blocks.amax(3), blocks.amin(3)], -1))

    _step(cache, qkv, next(steps))
    check(cache)
    fork = cache.fork()
    cache.crop(22)
    for _ in range(5):
        _step(cache, qkv, next(steps))
        check(cache)
    fork.reorder([1, 1, 0])
    _step(fork, qkv, 40, [1, 1, 0])
    check(fork)


def test_reordered_cropped_and_forked_caches_go_on_as_if_alone() -> None:
    cache, qkv = _filled()
    first = _step(cache, qkv, 31)
    cache.crop(31)
    other = cache.fork()
    for n in (40, 41, 42):
        _step(cache, qkv, n)
    torch.testing.assert_close(_step(other, qkv, 31), first)
    other.crop(31)
    other.reorder([1, 1, 0])
    torch.testing.assert_close(_step(other, qkv, 31, [1, 1, 0]), first[[1, 1, 0]])


@pytest.mark.parametrize("length", [31, 25])
def test_a_cache_that_goes_back_to_exact_columns_is_exact_again(length: int) -> None:
    cache, qkv = _filled()
    _step(cache, qkv, 31)
    cache.attend(Softmax(), *(x[:, :, 32:35] for x in qkv), mask=CAUSAL)
    assert (cache.length, cache.exact_len) == (35, 31)
    cache.crop(33)
    assert cache.exact_len == 31
    cache.crop(length)
    cache.attend(Softmax(), *(x[:, :, length : length + 3] for x in qkv), mask=CAUSAL)
    assert cache.exact_len == cache.length == length + 3
    cache.crop(0)
    assert cache.exact_len == 0


@pytest.mark.parametrize("kind", ["plain", "ragged", "gradients"])
def test_heads_that_are_read_a_few_at_a_time_are_those_read_together(
    kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    qkv, outs = _qkv(33), []
    positions = padded_positions([31, 9], side="left") if kind == "ragged" else None
    for limit in (1 << 23, 3 * 20 * DIM * 8, 1):  # bytes of keys: all, three of four heads, one
        monkeypatch.setattr("saccade.caches.block_read._AT_ONCE", limit)
        cache = BlockSelectCache(SIZE, 20)
        cache.attend(Softmax(), *(x[:, :, :31] for x in qkv), mask=CAUSAL, positions=positions)
        new = [x[:, :, 31:32].clone().requires_grad_(kind == "gradients") for x in qkv]
        outs.append([cache.attend(Softmax(), *new, mask=CAUSAL)])
        if kind == "gradients":
            outs[-1] += torch.autograd.grad(outs[-1][0].sin().sum(), new)
    for out in outs[1:]:
        torch.testing.assert_close(out, outs[0])


def test_bytes_are_counted_exactly() -> None:
    cache, qkv = _filled(max_len=42)
    token = 2 * KV_HEADS * DIM * 8 * 2  # batch, heads, width, bytes, key and value
    assert cache.nbytes == 44 * token  # whole blocks
    _step(cache, qkv, 31)
    summaries = 2 * KV_HEADS * 7 * 2 * DIM * 8
    assert cache.traffic == (4 * SIZE * token + 4 * token + summaries, token)
    assert cache.nbytes == 44 * token + 16 * summaries // 7
    _step(cache, qkv, 32)
    assert cache.traffic.bytes_read == (4 * SIZE + 1) * token + 8 * summaries // 7
    cache.attend(Softmax(), *(x[:, :, 33:36] for x in qkv), mask=CAUSAL)
    assert cache.traffic == (36 * token, 3 * token)
    short = BlockSelectCache(SIZE, 64)
    short.attend(Softmax(), *(x[:, :, :5] for x in qkv), mask=CAUSAL)
    short.attend(Softmax(), *(x[:, :, 5:6] for x in qkv), mask=CAUSAL)
    assert short.traffic == (6 * token, token)


def test_a_key_that_is_nan_is_read_as_the_dense_run_reads_it() -> None:
    cache, qkv = _filled()
    cache.key[0, 0, 9, 1] = math.nan
    out = _step(cache, qkv, 31)
    assert bool(out[0, :2].isnan().all())
    assert bool(out[0, 2:].isfinite().all())
    assert bool(out[1].isfinite().all())


def test_gradients_reach_the_new_token() -> None:
    cache, qkv = _filled()
    new = [x[:, :, 31:32].clone().requires_grad_() for x in qkv]
    fork = cache.fork()
    assert torch.autograd.gradcheck(
        lambda *own: fork.fork().attend(Softmax(), *own, mask=CAUSAL), new, atol=1e-6, fast_mode=True
    )
    out = cache.attend(Softmax(), *new, mask=CAUSAL)
    _step(cache, qkv, 32)
    out.sum().backward()
    assert all(x.grad is not None for x in new)


def test_a_call_that_fails_leaves_no_trace() -> None:
    cache, qkv = _filled()

    def fails(*args: object, **kwargs: object) -> None:
        raise RuntimeError("stopped")

    fork = cache.fork()
    with pytest.raises(RuntimeError, match="stopped"):
        cache.attend(fails, *(x[:, :, 40:41] for x in qkv), mask=CAUSAL)
    for n in range(31, 36):
        torch.testing.assert_close(_step(cache, qkv, n), _step(fork, qkv, n))


def test_impossible_arguments_are_refused() -> None:
    with pytest.raises(ValueError, match="budget must be a multiple of block_size 4; got 10"):
        BlockSelectCache(4, 10)
    with pytest.raises(ValueError, match="budget must cover 1 first and 2 last blocks of 4 tokens; got 8"):
        BlockSelectCache(4, 8)
    with pytest.raises(ValueError, match="local_blocks must be an int of at least 1; got 0"):
        BlockSelectCache(4, 8, local_blocks=0)
    with pytest.raises(TypeError, match="scorer must be a BlockScorer or None; got str"):
        BlockSelectCache(4, 16, scorer="mean")
    q, k, v = _qkv(20)
    with pytest.raises(NotImplementedError, match="is not a softmax, so there are no largest terms to select"):
        BlockSelectCache(4, 16).attend(Linear(), q, k, v, mask=CAUSAL)

    class Wrong(BlockBounds):
        def score(self, query: Tensor, summary: Tensor) -> Tensor:
            return super().score(query, summary)[..., 0]

    cache, qkv = _filled(scorer=Wrong())
    with pytest.raises(ValueError, match=r"BlockSelectCache\.attend: scores must .* = \[2, 4, 7\]; got \[2, 4\]"):
        _step(cache, qkv, 31)
    with pytest.raises(ValueError, match="must be a rule on positions"):
        _filled()[0].attend(Softmax(), *(x[:, :, :1] for x in qkv), mask=torch.ones(1, 32, dtype=torch.bool))
    assert cache.length == 31


@pytest.mark.parametrize(("needle_len", "strength"), [(1, 17.0), (8, 8.5)])
@pytest.mark.parametrize("scorer", [BlockBounds(), BlockMeans(), Everything()], ids=str)
def test_a_strong_needle_is_read_wherever_it_stands(scorer: BlockScorer, needle_len: int, strength: float) -> None:
    found = tasks.needle(40, 1023, 64, needle_len=needle_len, strength=strength, seed=2)
    cache = BlockSelectCache(16, 128, sink_blocks=0, local_blocks=1, scorer=scorer)
    cache.fill(found.key, found.value)
    own = torch.zeros(40, 1, 1, 64)
    out = cache.attend(Softmax(), found.query, own, own, mask=CAUSAL)
    dense = Softmax()(found.query, torch.cat([found.key, own], 2)) @ torch.cat([found.value, own], 2)
    near = (out - dense).flatten(1).norm(dim=1) < 0.2 * dense.flatten(1).norm(dim=1)
    assert float(near.double().mean()) >= 0.95
