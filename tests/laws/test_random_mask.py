"""Tests of `Random` and `bigbird` beyond the laws: one draw for every length, mode and process."""

import random

import numpy as np
import pytest
import torch
from tests.engine.kernels.native_levels import NATIVE

import saccade as sc
from saccade import masks

BIGBIRD = masks.bigbird(2, window_blocks=3, global_blocks=1, random_blocks=2, seed=3)


@pytest.mark.parametrize("seed", [0, 1, 2**40])
@pytest.mark.parametrize("blocks_per_row", [1, 2, 3, 7])
def test_each_row_draws_exactly_so_many_different_blocks_out_of_those_it_may(blocks_per_row, seed):
    drawn = masks.Random(blocks_per_row, 4, seed).drawn(np.arange(500))
    assert drawn.shape == (500, blocks_per_row)
    for row, blocks in enumerate(drawn.tolist()):
        assert len(set(blocks)) == blocks_per_row
        assert min(blocks) >= 0
        assert max(blocks) < 2 * max(row + 1, blocks_per_row)


def test_drawn_blocks_are_the_visible_ones():
    mask = masks.Random(2, 3, 5)
    allowed = mask.to_dense(60)[0, 0]
    drawn = mask.drawn(np.arange(20)).tolist()
    for q in range(60):
        seen = {kv // 3 for kv in torch.nonzero(allowed[q])[:, 0].tolist()}
        assert seen == {block for block in drawn[q // 3] if block < 20}


@pytest.mark.parametrize("mask", [masks.Random(2, 3, 5), BIGBIRD], ids=["random", "bigbird"])
def test_the_draw_is_the_same_for_every_length(mask):
    long = mask.to_dense(64)[0, 0]
    for kv_len in (1, 2, 7, 24, 63):
        assert torch.equal(mask.to_dense(kv_len)[0, 0], long[:kv_len, :kv_len])
        assert torch.equal(mask.to_dense(1, kv_len)[0, 0], long[kv_len - 1 : kv_len, :kv_len])


def test_the_draw_is_the_same_in_every_process_and_version():
    drawn = masks.Random(2, 2, 5).drawn(np.arange(8)).tolist()
    assert drawn == [[0, 2], [1, 2], [1, 4], [5, 6], [1, 2], [0, 10], [4, 9], [1, 11]]
    assert masks.Random(3, 64).drawn(np.array([0, 1000])).tolist() == [[0, 1, 2], [272, 664, 1564]]


def test_another_seed_draws_others():
    first, second = (masks.Random(1, 1, seed).drawn(np.arange(100, 200)) for seed in (0, 1))
    assert (first != second).mean() > 0.9


@pytest.mark.parametrize("impl", ["fused", "matmul", "reference", NATIVE])
def test_no_global_random_state_is_touched(impl):
    x = torch.randn(1, 2, 24, 8, requires_grad=True)
    states = random.getstate(), str(np.random.get_state()), torch.get_rng_state().tolist()
    mask = masks.bigbird(2, random_blocks=2, seed=9)
    sc.attention(x, x, x, mask, impl=impl).sum().backward()
    mask.to_dense(24)
    mask.plan(24)
    assert states == (random.getstate(), str(np.random.get_state()), torch.get_rng_state().tolist())


def test_training_and_evaluation_have_the_same_matrix_which_is_the_mask():
    layer = sc.nn.MultiHeadAttention(16, 2, mask=BIGBIRD)
    x = torch.randn(1, 20, 16)
    trained, evaluated = (layer.train(mode)(x) for mode in (True, False))
    assert torch.equal(trained, evaluated)
    query = torch.randn(1, 2, 20, 8)
    weights = sc.AttentionMatrix(query, query, BIGBIRD).to_dense()
    assert torch.equal(weights > 0, BIGBIRD.to_dense(20).expand(1, 2, 20, 20))
