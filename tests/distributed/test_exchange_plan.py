"""The plan of an exchange: who needs what of whom, by brute force; and the figures that it promises."""

import numpy as np
import pytest
import torch

import saccade as sc
from saccade import masks
from saccade.distributed import Machine, exchange
from saccade.distributed.exchange_plan import STRATEGIES
from saccade.distributed.layouts import NAMES

N = 97
MASKS = {
    "full": None,
    "causal": masks.Causal(),
    "window": masks.sliding_window(9),
    "longformer": masks.longformer(4, [0, 50]),
    "bigbird": masks.bigbird(8, random_blocks=1),
    "documents": masks.Documents([40, 30, 27], rule=masks.Causal()),
    "padding": masks.Causal() & masks.Padding([97, 50]),
    "all but near": ~masks.Window(3, 3),
    "a function": masks.Predicate(lambda b, h, q, kv: (q - kv) % 5 == 0),
}


def numbers(ranges):
    return np.concatenate([np.zeros(0, dtype=int), *(np.arange(span.start, span.stop) for span in ranges)])


@pytest.mark.parametrize("ranks", [1, 2, 3, 8, 60])
@pytest.mark.parametrize("layout", NAMES)
@pytest.mark.parametrize("name", MASKS)
def test_every_rank_gets_what_it_needs_and_no_more_than_is_counted(name, layout, ranks):
    mask = MASKS[name]
    plan = exchange(mask, N, 4, 2, 16, torch.float32, ranks, layout=layout, strategy="fetch")
    dense = (masks.Full() if mask is None else mask).to_dense(N, batch=1 if mask is None else mask.shape[0])
    seen = dense.any(0).any(0).numpy()
    parts = [plan.rank(rank) for rank in range(ranks)]
    rows = [numbers(part.rows) for part in parts]
    assert sorted(np.concatenate(rows).tolist()) == list(range(N))
    given = [set() for _ in range(ranks)]
    for rank, part in enumerate(parts):
        got = numbers([keys for _, keys in part.receives])
        assert len(set(got.tolist())) == len(got)
        assert set(np.flatnonzero(seen[rows[rank]].any(0)).tolist()) <= set(got.tolist()) | set(rows[rank].tolist())
        assert part.bytes_received == len(got) * plan.bytes_of_token == len(got) * 2 * 2 * 16 * 4
        for peer, keys in part.receives:
            assert set(keys) <= set(rows[peer].tolist())
            given[peer] |= {(rank, key) for key in keys}
    for rank, part in enumerate(parts):
        assert {(peer, key) for peer, keys in part.sends for key in keys} == given[rank]
        assert part.bytes_sent == len(given[rank]) * plan.bytes_of_token


def test_work_is_that_of_the_pairs():
    for name in ("full", "causal", "documents"):
        mask = masks.Full() if MASKS[name] is None else MASKS[name]
        n = 1024
        rule = masks.Documents([500, 524], rule=masks.Causal()) if name == "documents" else mask
        plan = exchange(rule, n, 3, ranks=4, layout="zigzag", strategy="fetch")
        exact = 3 * int(rule.to_dense(n).sum())
        assert plan.pairs.sum() == pytest.approx(exact, rel=0.1)


def test_a_window_costs_the_same_however_long_the_sequence():
    plans = [exchange(masks.sliding_window(4096), n, 32, 8, 128, ranks=n >> 10) for n in (1 << 18, 1 << 19, 1 << 20)]
    assert {plan.strategy for plan in plans} == {"fetch"}
    assert {plan.layout.name for plan in plans} == {"contiguous"}
    assert {int(plan.bytes_sent.max()) for plan in plans} == {4095 * 4096}  # 16 MiB, but for one token
    ring = exchange(masks.sliding_window(4096), 1 << 20, 32, 8, 128, ranks=1024, strategy="gather", layout="contiguous")
    assert int(ring.bytes_sent.max()) == 4092 << 20
    assert plans[2].ranks == 1024
    assert plans[2].imbalance < 1.01


def test_packed_documents_are_balanced_by_work():
    drawn = np.random.default_rng(0)
    lengths = np.minimum(drawn.lognormal(7, 1.3, 2000).astype(int) + 1, 32768).tolist()
    rule, n = masks.Documents(lengths, rule=masks.Causal()), sum(lengths)
    even = {name: exchange(rule, n, 32, 8, 128, ranks=64, layout=name, strategy="fetch") for name in NAMES}
    assert even["balanced"].imbalance <= 1.05 < even["zigzag"].imbalance < even["contiguous"].imbalance
    chosen = exchange(rule, n, 32, 8, 128, ranks=64)
    assert (chosen.layout.name, chosen.strategy) == ("balanced", "fetch")
    assert "1.0" in str(chosen).split("pairs on the busiest rank, ")[1][:4]
    assert max(map(len, str(chosen).splitlines())) < 160


def test_causal_work_is_even_in_a_zigzag():
    plans = {
        name: exchange(masks.Causal(), 1 << 16, 8, ranks=8, layout=name, strategy="fetch")
        for name in ("contiguous", "zigzag")
    }
    assert plans["zigzag"].imbalance == pytest.approx(1.0, abs=1e-6)
    assert plans["contiguous"].imbalance == pytest.approx(15 / 8, rel=1e-2)


def test_strategies_that_cannot_be():
    with pytest.raises(sc.UnsupportedError, match="8 ranks do not divide 12 heads and 4 key heads"):
        exchange(None, 1024, 12, 4, ranks=8, strategy="ulysses")
    per_head = masks.Blocks(torch.ones(2, 4, 4, dtype=torch.bool)[:, :, :], 256)
    plan = exchange(per_head, 1024, 8, ranks=2)
    assert any("differs between heads" in why for why in plan.refused.get("ulysses", ())) == (per_head.shape[1] > 1)
    plan = exchange(None, 1 << 16, 32, 32, 128, ranks=8, layout="contiguous")
    assert plan.strategy == "ulysses"  # an eighth of all rows in place of all keys
    assert plan.rounds == 2
    assert plan.rank(0).receives == ()
    slow = Machine(latency=1.0)
    assert exchange(None, 1 << 16, 32, 32, 128, ranks=8, layout="contiguous", machine=slow).strategy != "ulysses"


def test_plans_are_equal_where_all_is():
    one, again = (exchange(masks.Causal(), 1000, 4, ranks=4) for _ in range(2))
    assert one.fingerprint == again.fingerprint
    others = [
        exchange(masks.sliding_window(999), 1000, 4, ranks=4),
        exchange(masks.Causal(), 1001, 4, ranks=4),
        exchange(masks.Causal(), 1000, 4, 2, ranks=4),
        exchange(masks.Causal(), 1000, 4, ranks=5),
        exchange(masks.Causal(), 1000, 4, ranks=4, layout="striped"),
        exchange(masks.Causal(), 1000, 4, ranks=4, strategy="gather"),
        exchange(masks.Causal(), 1000, 4, ranks=4, dtype=torch.float32),
    ]
    assert len({plan.fingerprint for plan in others} | {one.fingerprint}) == 8


@pytest.mark.parametrize(
    ("arguments", "options", "sentence"),
    [
        (("causal", 8, 2), {}, "exchange: mask must be a mask or None; got str"),
        ((None, 0, 2), {}, "exchange: seq_len must be an int of at least 1; got 0"),
        ((None, 8, 2, 3), {}, "exchange: kv_heads must divide the 2 heads; got 3"),
        ((None, 8, 2), {"ranks": 0}, "exchange: ranks must be an int of at least 1"),
        ((None, 8, 2), {"layout": "ring"}, "exchange: layout must be one of 'auto', 'contiguous'"),
        ((None, 8, 2), {"strategy": "ring"}, "exchange: strategy must be one of 'auto', 'fetch'"),
        ((None, 8, 2), {"dtype": "float32"}, "exchange: dtype must be a torch.dtype; got str"),
    ],
)
def test_refused_plans(arguments, options, sentence):
    with pytest.raises((TypeError, ValueError), match=f"^{sentence}"):
        exchange(*arguments, **options)


def test_names():
    assert STRATEGIES == ("fetch", "gather", "ulysses")
    with pytest.raises(ValueError, match=r"Exchange.rank: number must be below 2; got 2"):
        exchange(None, 8, 2, ranks=2).rank(2)
