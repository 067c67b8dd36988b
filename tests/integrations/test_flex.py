"""Our masks in FlexAttention and in transformers: the same objects, the same pairs."""

import functools

import numpy as np
import pytest
import torch
from tests.sampled import sampled
from torch._dynamo import config
from torch.nn.attention.flex_attention import create_block_mask, flex_attention
from transformers.masking_utils import sdpa_mask

import saccade as sc
from saccade import masks
from saccade.engine.kernels.flex import Flex, _compiled_flex
from saccade.integrations.flex import block_mask
from saccade.masks.rules.key_ranges import KeyRanges
from saccade.testing import CASES, Case

EDGES = np.sort(np.random.default_rng(0).permuted(np.tile(np.arange(97), (2, 96, 1)), axis=-1)[..., :6])
MASKS = [
    masks.Full(),
    masks.Causal(),
    masks.longformer(9, [0, 50]),
    masks.bigbird(8, random_blocks=1),
    masks.streaming(2, 20),
    masks.sparse_transformer(7),
    masks.Documents([[40, 30, 26], [96]], rule=masks.Causal()),
    masks.Causal() & masks.Padding([96, 50]),
    masks.Causal() & masks.Blocks(torch.eye(4, dtype=torch.bool).expand(2, 4, 4), 24),
    ~masks.Window(3, 3),
    masks.Dense(torch.eye(96, dtype=torch.bool).expand(2, 2, 96, 96)),
    masks.PerItem([masks.Causal(), masks.Window(2, 2)]),
    masks.Neighborhood(8, 12, 3),
    masks.Random(16, 2),
    KeyRanges(EDGES[..., ::2], EDGES[..., 1::2], 96),
]


def _same_pairs(block: object, allowed: torch.Tensor, size: tuple[int, int]) -> None:
    """A BlockMask, written out as FlexAttention reads it, equals the dense mask."""
    got = torch.zeros_like(allowed)
    batch = len(allowed)
    for kind, (count, index) in enumerate(
        ((block.kv_num_blocks, block.kv_indices), (block.full_kv_num_blocks, block.full_kv_indices))
    ):
        for b in range(batch):
            for row in range(count.shape[-1]):
                own = min(b, count.shape[0] - 1)
                for column in index[own, 0, row, : count[own, 0, row]].tolist():
                    rows, columns = (slice(x * n, (x + 1) * n) for x, n in zip((row, column), size, strict=True))
                    assert not got[b, :, rows, columns].any()
                    cells = allowed[b, :, rows, columns]
                    assert kind == 0 or cells.all()
                    got[b, :, rows, columns] = cells
    assert torch.equal(got, allowed)


@pytest.mark.parametrize("mask", MASKS, ids=str)
@pytest.mark.parametrize("q_len", [96, 40])
def test_block_masks_allow_what_the_mask_allows(mask: masks.Mask, q_len: int) -> None:
    allowed = mask.to_dense(q_len, 96, batch=2, heads=2)
    block = block_mask(mask, q_len, 96, block_size=16)
    _same_pairs(block, allowed, (16, 16))
    theirs = create_block_mask(mask, mask.shape[0], mask.shape[1], 96, 96, device="cpu", BLOCK_SIZE=16)
    if q_len == 96 and mask.shape == (1, 1):  # torch's own construction asks every pair, at indices
        assert block.sparsity() == pytest.approx(theirs.sparsity())


@pytest.mark.ci
@pytest.mark.parametrize("size", [(128, 128), (256, 128)], ids=str)
@pytest.mark.parametrize("case", [case for case in CASES if case.q_positions is None], ids=str)
def test_blocks_of_the_sizes_that_backends_ask_for(case: Case, size: tuple[int, int]) -> None:
    """Every mask that the laws are tried on, at its own length and over several blocks."""
    mask = masks.Full() if case.mask is None else case.mask
    domain = mask.domain.rows
    lengths = [(case.q_len, case.kv_len)] if domain is not None else [(case.q_len, case.kv_len), (300, 300), (140, 600)]
    for q_len, kv_len in lengths:
        allowed = mask.to_dense(q_len, kv_len)
        _same_pairs(block_mask(mask, q_len, kv_len, block_size=size), allowed, size)


@pytest.mark.ci
@pytest.mark.filterwarnings("ignore:.*flex_attention called without torch.compile.*")
@pytest.mark.filterwarnings("ignore::DeprecationWarning")
@pytest.mark.parametrize("mask", sampled(MASKS, 3), ids=str)
def test_flex_attention_gives_the_same_output(mask: masks.Mask) -> None:
    q, k, v = (torch.randn(2, 2, 96, 16) for _ in range(3))
    expected = sc.attention(q, k, v, mask)
    block = block_mask(mask, 96, batch=2, block_size=32)
    torch.testing.assert_close(flex_attention(q, k, v, block_mask=block), expected, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("mask", MASKS, ids=str)
def test_transformers_takes_the_mask_as_its_mask_function(mask: masks.Mask) -> None:
    got = sdpa_mask(
        batch_size=2, q_length=96, kv_length=96, q_offset=0, kv_offset=0, mask_function=mask, allow_is_causal_skip=False
    )
    heads = mask.shape[1]
    if heads == 1:
        assert torch.equal(got.expand(2, 1, 96, 96), mask.to_dense(96, batch=2))
    else:  # its interface asks about head 0 for all heads
        assert torch.equal(got[:, 0], mask.to_dense(96, batch=2)[:, 0])


def test_a_block_size_that_cannot_be() -> None:
    with pytest.raises(ValueError, match="block_mask: block_size must be an int of at least 1; got 0"):
        block_mask(masks.Causal(), 8, block_size=0)
    with pytest.raises(ValueError, match="block_mask: block_size must be an int or a pair of ints"):
        block_mask(masks.Causal(), 8, block_size=(1, 2, 3))
    with pytest.raises(ValueError, match="block_mask: mask must be for 1 or 3 batch items; got 2"):
        block_mask(masks.Padding([1, 2]), 8, batch=3)


@pytest.fixture
def fresh():
    torch.compiler.reset()
    _compiled_flex.cache_clear()
    yield
    torch.compiler.reset()
    _compiled_flex.cache_clear()


@pytest.mark.usefixtures("fresh")
def test_torch_2_11_has_room_for_as_many_kinds_of_masks(monkeypatch):
    """There torch.compile takes no limit of its own, and that of all compiled functions, 8, is soon reached."""
    seen = []

    def of_2_11(function, *, fullgraph):
        assert fullgraph
        return lambda *tensors, **options: seen.append((config.recompile_limit, tensors, options))

    before = config.recompile_limit
    monkeypatch.setattr(torch, "compile", of_2_11)
    Flex().function()(1, scale=2)
    assert seen == [(64, (1,), {"scale": 2})]
    assert config.recompile_limit == before


@pytest.mark.ci
@pytest.mark.usefixtures("fresh")
@pytest.mark.filterwarnings("ignore:flex_attention called without")
def test_a_user_who_reaches_the_limit_of_recompiles_does_not_stop_ours(monkeypatch):
    graphs = {"theirs": 0, "ours": 0}

    def counted(name):
        def backend(graph, inputs):
            graphs[name] += 1
            return graph

        return backend

    query = torch.randn(1, 2, 32, 16)
    theirs = torch.compile(flex_attention, backend=counted("theirs"))
    with config.patch(recompile_limit=1):
        for mask in (masks.Causal(), masks.Window(3, 3)):
            theirs(query, query, query, block_mask=block_mask(mask, 32, block_size=32))
    assert graphs["theirs"] == 1
    monkeypatch.setattr(torch, "compile", functools.partial(torch.compile, backend=counted("ours")))
    with torch.no_grad():
        out = Flex().function()(query, query, query, block_mask=block_mask(masks.Causal(), 32, block_size=32))
    assert graphs["ours"] == 1
    torch.testing.assert_close(out, sc.attention(query, query, query, masks.Causal(), impl="reference"))
