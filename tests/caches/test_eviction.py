"""Caches that let tokens go: dense until they do, and then the dense run in which these are hidden."""

import pytest
import torch
from torch import Tensor

from saccade import masks
from saccade.caches import EvictingCache, HeavyHitterCache, Held, KVCache, LayerCache, SnapKVCache, padded_positions
from saccade.mechanisms import Softmax
from saccade.nn import MultiHeadAttention
from saccade.positions import ALiBi, Rotary

HEADS, KV_HEADS, DIM = 4, 2, 4
CAUSAL = masks.Causal()
RULES = [CAUSAL, masks.sliding_window(12), masks.Predicate(lambda b, h, q, kv: (kv <= q) & ((q + kv + h) % 3 != 0))]
MECHANISMS = {
    "plain": Softmax,
    "alibi": lambda: Softmax(bias=ALiBi(HEADS)),
    "capped": lambda: Softmax(softcap=3.0),  # runs through complete rows
}


class SmallestKeys(EvictingCache):
    """A rule of one's own: the tokens with the smallest keys stay."""

    voting_queries = 0

    def score(self, held: Held) -> Tensor:
        return -held.key.norm(dim=-1)


KINDS = {
    "own": lambda: SmallestKeys(9, recent=3),
    "heavy": lambda: HeavyHitterCache(9, recent=3),
    "snap": lambda: SnapKVCache(9, window=3, pool=3),
}


def _dense(
    q: Tensor, k: Tensor, v: Tensor, rule: masks.Mask, sizes: list[int], kind: str, name: str
) -> tuple[Tensor, Tensor]:
    """Return the output and the tokens held at the end, bool [B, G, keys], by definition and in plain operations."""
    batch, _, total, _ = q.shape
    group = HEADS // KV_HEADS
    held = torch.zeros(batch, KV_HEADS, total, dtype=torch.bool)
    received = torch.zeros(batch, KV_HEADS, total, dtype=torch.float64)
    outs, start = [], 0
    for number, size in enumerate(sizes):
        stop = start + size
        held[:, :, start:stop] = True
        allowed = rule.to_dense(total, batch=batch, heads=HEADS)[:, :, start:stop].expand(batch, HEADS, size, total)
        allowed = allowed & held.repeat_interleave(group, 1)[:, :, None]
        scores = q[:, :, start:stop] @ k.repeat_interleave(group, 1).mT * DIM**-0.5
        if name == "capped":
            scores = 3.0 * (scores / 3.0).tanh()
        if name == "alibi":
            slopes = 2.0 ** (-8.0 * torch.arange(1, HEADS + 1) / HEADS)
            distance = torch.arange(start, stop)[:, None] - torch.arange(total)
            scores = scores - slopes[:, None, None] * distance
        weights = scores.masked_fill(~allowed, -torch.inf).softmax(-1).nan_to_num()
        outs.append(weights @ v.repeat_interleave(group, 1))
        judging = weights[:, :, -3:] if kind == "snap" else weights
        received += judging.sum(2).view(batch, KV_HEADS, group, total).sum(2)
        rank = -k.norm(dim=-1) if kind == "own" else received
        if kind == "snap":
            padded = torch.nn.functional.pad(received[..., :stop], (1, 1))
            rank = (padded[..., :-2] + padded[..., 1:-1] + padded[..., 2:]) / 3
        for b in range(batch):
            for g in range(KV_HEADS):
                there = held[b, g].nonzero()[:, 0].tolist()
                if len(there) > 9 and (kind != "snap" or number == 0):
                    best = sorted(there[:-3], key=lambda j, b=b, g=g: -float(rank[b, g, j]))[:6]
                    held[b, g] = False
                    held[b, g, [*best, *there[-3:]]] = True
        start = stop
    return torch.cat(outs, 2), held


@pytest.mark.parametrize("name", MECHANISMS)
@pytest.mark.parametrize("rule", RULES, ids=str)
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("sizes", [[20, 1, 1, 1, 3, 1], [5, 1, 1, 1, 1, 1, 1, 9, 7], [1] * 27], ids=str)
def test_it_is_the_dense_run_in_which_what_went_is_hidden(
    sizes: list[int], kind: str, rule: masks.Mask, name: str
) -> None:
    torch.manual_seed(0)
    q, k, v = (torch.randn(2, heads, 27, DIM, dtype=torch.float64) for heads in (HEADS, KV_HEADS, KV_HEADS))
    expected, held = _dense(q, k, v, rule, sizes, kind, name)
    cache, parts = KINDS[kind](), [x.split(sizes, 2) for x in (q, k, v)]
    out = [cache.attend(MECHANISMS[name](), *own, mask=rule) for own in zip(*parts, strict=True)]
    torch.testing.assert_close(torch.cat(out, 2), expected)
    for b in range(2):
        for g in range(KV_HEADS):
            assert cache.kv_positions[b, g].tolist() == held[b, g].nonzero()[:, 0].tolist()
    assert (cache.length, cache.positions(2)) == (27, range(27, 29))


@pytest.mark.parametrize("cache", [HeavyHitterCache(40), SnapKVCache(40)], ids=str)
def test_a_budget_for_everything_is_dense(cache: LayerCache) -> None:
    mha = MultiHeadAttention(16, HEADS, num_kv_heads=2, mask=CAUSAL, rotary=Rotary(4)).double().eval()
    mha.requires_grad_(False)
    x, dense, cache = torch.randn(3, 30, 16).double(), KVCache(), cache.fork()
    positions = padded_positions([12, 5, 9], side="left")
    for own in (dense, cache):
        own.out = [mha(x[:, :12], cache=own, positions=positions)]
        own.out += [mha(x[:, a:b], cache=own) for a, b in ((12, 13), (13, 17), (17, 18))]
    for mine, full in zip(cache.out, dense.out, strict=True):
        torch.testing.assert_close(mine, full)


@pytest.mark.parametrize("kind", KINDS)
def test_items_of_a_ragged_batch_are_what_each_is_alone(kind: str) -> None:
    mha = MultiHeadAttention(16, HEADS, num_kv_heads=2, mask=CAUSAL, rotary=Rotary(4)).double().eval()
    mha.requires_grad_(False)
    x, lengths = torch.randn(2, 40, 16).double(), [20, 14]
    positions = padded_positions(lengths, side="left")
    padded = torch.full((2, 20, 16), 3.0).double()
    for b, length in enumerate(lengths):
        padded[b, positions[b] >= 0] = x[b, :length]
    cache, alone = KINDS[kind](), [KINDS[kind]() for _ in lengths]
    mha(padded, positions=positions, cache=cache)
    for b, length in enumerate(lengths):
        mha(x[b : b + 1, :length], cache=alone[b])
    for step in range(8):
        new = torch.stack([x[b, length + step] for b, length in enumerate(lengths)])[:, None]
        expected = torch.cat([mha(new[b : b + 1], cache=alone[b]) for b in range(2)])
        torch.testing.assert_close(mha(new, cache=cache), expected)


@pytest.mark.parametrize("kind", KINDS)
def test_forked_and_reordered_caches_go_on_as_if_alone(kind: str) -> None:
    q, k, v = (torch.randn(2, heads, 27, DIM).double() for heads in (HEADS, KV_HEADS, KV_HEADS))
    cache = KINDS[kind]()
    cache.attend(Softmax(), q[:, :, :20], k[:, :, :20], v[:, :, :20], mask=CAUSAL)
    fork, noise = cache.fork(), cache.fork()
    noise.attend(Softmax(), q[:, :, 24:], k[:, :, 24:], v[:, :, 24:], mask=CAUSAL)
    fork.reorder([1, 0, 1])
    for n in range(20, 26):
        own = cache.attend(Softmax(), *(x[:, :, n : n + 1] for x in (q, k, v)), mask=CAUSAL)
        other = fork.attend(Softmax(), *(x[[1, 0, 1], :, n : n + 1] for x in (q, k, v)), mask=CAUSAL)
        torch.testing.assert_close(other, own[[1, 0, 1]])
    with pytest.raises(NotImplementedError, match="by the attention of queries that cropping would remove"):
        cache.crop(3)
    cache.crop(0)
    assert (cache.length, cache.nbytes, cache.positions(1)) == (0, 0, range(1))


def test_bytes_are_counted_exactly() -> None:
    cache = HeavyHitterCache(9)
    q, k, v = (torch.randn(2, heads, 27, DIM) for heads in (HEADS, KV_HEADS, KV_HEADS))
    token = 2 * KV_HEADS * (2 * DIM * 4 + 8 + 4)
    cache.attend(Softmax(), q[:, :, :20], k[:, :, :20], v[:, :, :20], mask=CAUSAL)
    assert (cache.nbytes, cache.traffic) == (9 * token, (20 * token, 20 * token))
    cache.attend(Softmax(), *(x[:, :, 20:21] for x in (q, k, v)), mask=CAUSAL)
    assert (cache.nbytes, cache.traffic) == (9 * token, (10 * token, token))


def test_the_first_token_alone_is_read_and_appended() -> None:
    cache, x = HeavyHitterCache(9), torch.randn(2, KV_HEADS, 1, DIM)
    token = 2 * KV_HEADS * (2 * DIM * 4 + 8 + 4)
    cache.attend(Softmax(), x, x, x, mask=CAUSAL)
    assert cache.traffic == (token, token)


@pytest.mark.parametrize("is_ragged", [False, True])
@pytest.mark.parametrize("judges", [None, 0, 1, 2, 5, 7])
def test_received_attention_comes_from_the_last_queries_of_a_call(judges: int | None, is_ragged: bool) -> None:
    sizes = (7, 3)
    q, k, v = (torch.randn(2, heads, 10, DIM, dtype=torch.float64) for heads in (HEADS, KV_HEADS, KV_HEADS))
    first = padded_positions([7, 5 if is_ragged else 7], side="left")
    where = torch.cat([first, first[:, -1:] + torch.arange(1, 4)], 1)
    cache, start = SmallestKeys(20), 0
    cache.voting_queries = judges
    expected = torch.zeros(2, KV_HEADS, 10, dtype=torch.float64)
    for size in sizes:
        stop = start + size
        own = [x[:, :, start:stop] for x in (q, k, v)]
        cache.attend(Softmax(), *own, mask=CAUSAL, positions=where[:, start:stop] if is_ragged else None)
        allowed = (where[:, None, :] <= where[:, start:stop, None]) & (where[:, None, :] >= 0)
        scores = q[:, :, start:stop] @ k.repeat_interleave(2, 1).mT * DIM**-0.5
        weights = scores.masked_fill(~allowed[:, None], -torch.inf).softmax(-1).nan_to_num()
        last = weights[:, :, max(0, size - (size if judges is None else judges)) :]
        expected += last.sum(2).unflatten(1, (KV_HEADS, 2)).sum(2)
        start = stop
    torch.testing.assert_close(cache.state()[1]["received"], expected)


def test_queries_vote_only_once() -> None:
    cache, x = SnapKVCache(9, window=3), torch.randn(2, KV_HEADS, 20, DIM)
    cache.attend(Softmax(), x, x, x, mask=CAUSAL)
    before = cache.state()[1]["received"]
    cache.attend(Softmax(), *[x[:, :, :2]] * 3, mask=CAUSAL)
    expected = torch.nn.functional.pad(before, (0, 2))
    torch.testing.assert_close(cache.state()[1]["received"], expected, atol=0, rtol=0)


def test_impossible_arguments_are_refused() -> None:
    with pytest.raises(ValueError, match="recent must be at most the budget 4; got 5"):
        HeavyHitterCache(4, recent=5)
    with pytest.raises(ValueError, match="window must be at most the budget 4; got 32"):
        SnapKVCache(4)
    with pytest.raises(ValueError, match="pool must be odd; got 4"):
        SnapKVCache(40, pool=4)
    with pytest.raises(ValueError, match="HeavyHitterCache: budget must be an int of at least 1; got 0"):
        HeavyHitterCache(0)
    cache, x = HeavyHitterCache(4), torch.randn(1, 2, 9, 4)
    cache.attend(Softmax(), x, x, x, mask=CAUSAL)
    with pytest.raises(ValueError, match="positions must increase and come after those in the cache"):
        cache.attend(Softmax(), x, x, x, mask=CAUSAL, positions=range(9))
    with pytest.raises(ValueError, match="kv_heads of key must be 2, as in the cache; got 1"):
        cache.attend(Softmax(), x, x[:, :1], x[:, :1], mask=CAUSAL)


def test_a_score_of_another_shape_is_refused() -> None:
    class Wrong(EvictingCache):
        def score(self, held: Held) -> Tensor:
            return held.received.sum(1)

    x = torch.randn(1, 2, 9, 4)
    with pytest.raises(ValueError, match=r"Wrong\.attend: scores must have shape .* = \[1, 2, 9\]; got \[1, 9\]"):
        Wrong(4).attend(Softmax(), x, x, x, mask=CAUSAL)
    base = EvictingCache(4)
    base.attend(Softmax(), *[x[:, :, :4]] * 3, mask=CAUSAL)  # nothing is asked where all may stay
    with pytest.raises(NotImplementedError, match=r"EvictingCache must define score\(held\)"):
        base.attend(Softmax(), *[x[:, :, 4:5]] * 3, mask=CAUSAL)
    assert (base.length, base.kv_positions.tolist()) == (4, [[[0, 1, 2, 3]] * 2])


_SCATTERED = [
    [0, -1, 1, 2, -1, -1, 3, 4, 5, 6, -1, 7, 8, 9, -1, 10, 11, 12, 13, -1],
    [-1, 0, 1, -1, -1, -1, -1, -1, 2, -1, 3, 4, 5, -1, -1, -1, -1, 6, -1, -1],
]
PADDED = {
    "left": padded_positions([20, 6], side="left"),
    "right": padded_positions([20, 6], side="right"),
    "both long": padded_positions([20, 14], side="right"),
    "scattered": torch.tensor(_SCATTERED),
    "all of one": padded_positions([20, 0], side="right"),
}


@pytest.mark.ci
@pytest.mark.parametrize(
    "mechanism, rule",
    [(Softmax(), CAUSAL), (Softmax(softcap=3.0), masks.sliding_window(12))],
    ids=["plain", "capped in a window"],
)
@pytest.mark.parametrize("where", PADDED)
@pytest.mark.parametrize("kind", KINDS)
def test_padding_anywhere_and_in_later_calls_takes_no_place(
    kind: str, where: str, mechanism: Softmax, rule: masks.Mask
) -> None:
    torch.manual_seed(0)
    q, k, v = (torch.randn(2, heads, 50, DIM, dtype=torch.float64) for heads in (HEADS, KV_HEADS, KV_HEADS))
    # Tokens of each call, for each item; the first call is the prompt.
    calls = [PADDED[where] >= 0, *(torch.tensor(c) > 0 for c in ([[1], [1]], [[1, 1, 0], [0, 1, 0]], [[0], [1]]))]
    calls += [torch.ones(2, 1) > 0] * 6 + [torch.tensor([[1, 0, 0, 0, 0], [0, 1, 1, 0, 1]]) > 0]
    cache, alone, done = KINDS[kind](), [KINDS[kind](), KINDS[kind]()], [0, 0]
    for is_there in calls:
        positions = torch.full(is_there.shape, -1)
        new = [torch.full((2, x.shape[1], is_there.shape[1], DIM), 9.0, dtype=torch.float64) for x in (q, k, v)]
        expected = []
        for b, row in enumerate(is_there):
            own = slice(done[b], done[b] + int(row.sum()))
            positions[b, row] = torch.arange(own.start, own.stop)
            for x, source in zip(new, (q, k, v), strict=True):
                x[b, :, row] = source[b, :, own]
            if own.stop > own.start:
                one = [x[b : b + 1, :, own] for x in (q, k, v)]
                expected.append((b, row, alone[b].attend(mechanism, *one, mask=rule)))
            done[b] = own.stop
        out = cache.attend(mechanism, *new, mask=rule, positions=positions)
        for b, row, value in expected:
            torch.testing.assert_close(out[b : b + 1, :, row], value)
            for g in range(KV_HEADS):
                held = cache.kv_positions[b, g]
                assert held[held >= 0].tolist() == alone[b].kv_positions[0, g].tolist()


@pytest.mark.parametrize("kind", KINDS)
def test_a_short_item_keeps_all_its_tokens_on_either_side_of_its_padding(kind: str) -> None:
    x = torch.randn(2, KV_HEADS, 20, DIM)
    for side in ("left", "right"):
        cache = KINDS[kind]()
        cache.attend(Softmax(), x, x, x, mask=CAUSAL, positions=padded_positions([20, 6], side=side))
        assert cache.kv_positions[1].tolist() == [[-1, -1, -1, 0, 1, 2, 3, 4, 5]] * KV_HEADS


@pytest.mark.parametrize("row", [[0, -1, -1, -1], [0, -1, 1, 2], [0, 1, 2, -1], [-1, 0, -1, 1], [0, 1, -1, 2]], ids=str)
def test_padding_stands_before_all_tokens(row: list[int]) -> None:
    cache, x = HeavyHitterCache(9), torch.randn(2, KV_HEADS, 4, DIM)
    cache.attend(Softmax(), x, x, x, mask=CAUSAL, positions=torch.tensor([[0, 1, 2, 3], row]))
    assert cache.kv_positions[1].tolist() == [sorted(row)] * KV_HEADS
    order = torch.tensor(row).sort(stable=True).indices
    torch.testing.assert_close(cache.state()[1]["key"][1], x[1][:, order], atol=0, rtol=0)
