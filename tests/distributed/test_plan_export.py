"""Tests of plans exported in the formats of other engines."""

import pytest
import torch
from torch.nn.attention.flex_attention import flex_attention

import saccade as sc
from saccade import masks
from saccade.distributed import block_mask, cp_comm_types, exchange, qk_ranges


@pytest.mark.ci
@pytest.mark.filterwarnings("ignore:.*flex_attention called without torch.compile.*")
@pytest.mark.filterwarnings("ignore::DeprecationWarning")
@pytest.mark.parametrize("layout", ["contiguous", "zigzag"])
@pytest.mark.parametrize(
    "mask", [masks.Causal(), masks.sliding_window(9), masks.Documents([40, 56], rule=masks.Causal())], ids=str
)
def test_flex_attention_runs_the_rows_of_a_rank(mask, layout):
    query, key, value = torch.randn(3, 1, 2, 96, 16)
    expected = sc.attention(query, key, value, mask)
    plan = exchange(mask, 96, 2, ranks=3, layout=layout, strategy="fetch")
    for rank in range(3):
        own = plan.rank(rank)
        rows = torch.cat([torch.arange(span.start, span.stop) for span in own.rows])
        fetched = [torch.arange(keys.start, keys.stop) for _, keys in own.receives]
        columns = torch.cat([rows, *fetched]).sort().values
        blocks = block_mask(plan, rank, (16, 32))
        got = flex_attention(query[:, :, rows], key[:, :, columns], value[:, :, columns], block_mask=blocks)
        torch.testing.assert_close(got, expected[:, :, rows], atol=1e-5, rtol=1e-5)


def test_masks_without_flex_blocks():
    plan = exchange(None, 96, 4, ranks=2, strategy="ulysses")
    with pytest.raises(sc.UnsupportedError, match="each rank then has all rows of its heads"):
        block_mask(plan, 0)


def test_kinds_of_exchange_by_layer():
    layers = [None, masks.Causal(), masks.sliding_window(4096), masks.Causal() & masks.Window(9, None)]
    assert cp_comm_types(layers) == ["p2p", "p2p", "a2a", "a2a"]
    for mask in (masks.Window(3, 3), masks.longformer(3, [0]), masks.Documents([4, 4], rule=masks.Causal())):
        with pytest.raises(sc.UnsupportedError, match="layer 1 has "):
            cp_comm_types([None, mask])


def covered(pieces, n):
    """Return how many pieces cover each pair, by the definition of their kinds."""
    counts = torch.zeros(n, n, dtype=torch.int64)
    for (first, stop), (start, end), kind in zip(*pieces, strict=True):
        for row in range(first, stop):
            low = start + (row - first if kind in ("inv_causal", "bi_causal") else 0)
            high = end - (stop - 1 - row if kind in ("causal", "bi_causal") else 0)
            counts[row, low:high] += 1
    return counts


RANGED = {
    "full": (masks.Full(), 1),
    "causal": (masks.Causal(), 1),
    "window": (masks.sliding_window(9), 2),
    "both sides": (masks.Window(7, 3), 3),
    "documents": (masks.Documents([20, 5, 39], rule=masks.sliding_window(8)), 5),
    "longformer": (masks.longformer(3, [0, 30]), None),
    "strided": (masks.Causal() & masks.Strided(4), None),
    "blocks": (masks.bigbird(8, random_blocks=1), None),
    "late": (masks.Causal() & ~masks.Window(3, 0), None),
    "function": (masks.Predicate(lambda b, h, q, kv: (q + kv) % 5 < 2), None),
}


@pytest.mark.parametrize("name", RANGED)
def test_ranges_cover_each_pair_once(name):
    mask, count = RANGED[name]
    pieces = qk_ranges(mask, 64)
    assert torch.equal(covered(pieces, 64), mask.to_dense(64)[0, 0].long())
    assert count in (None, len(pieces.q_ranges))


def test_ranges_are_of_one_mask():
    with pytest.raises(sc.UnsupportedError, match="its ranges apply to all batch items"):
        qk_ranges(masks.Padding([3, 4]), 4)
