"""A plan in the words of other engines."""

import pytest
import torch
from torch.nn.attention.flex_attention import flex_attention

import saccade as sc
from saccade import masks
from saccade.distributed import exchange
from saccade.distributed.exports import block_mask, cp_comm_types


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


def test_what_flex_attention_gets_no_blocks_for():
    plan = exchange(None, 96, 4, ranks=2, strategy="ulysses")
    with pytest.raises(sc.UnsupportedError, match="each rank then has all rows of its heads"):
        block_mask(plan, 0)


def test_kinds_of_exchange_by_layer():
    layers = [None, masks.Causal(), masks.sliding_window(4096), masks.Causal() & masks.Window(9, None)]
    assert cp_comm_types(layers) == ["p2p", "p2p", "a2a", "a2a"]
    for mask in (masks.Window(3, 3), masks.longformer(3, [0]), masks.Documents([4, 4], rule=masks.Causal())):
        with pytest.raises(sc.UnsupportedError, match="layer 1 has "):
            cp_comm_types([None, mask])
