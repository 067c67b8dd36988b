"""The question of chosen blocks and known prefixes, at tiny sizes."""

import pytest
import torch

from benchmarks import sparse_decode


def test_the_same_tokens_are_in_both_caches():
    its = sparse_decode.case(50, 16, 4, 4, 2, 8)
    assert torch.equal(its.chosen.key, its.dense.key)
    sparse_decode.check(its)
    its.step(its.chosen)
    its.step(its.dense)
    assert its.chosen.length == its.dense.length == 49


def test_another_value_is_noticed():
    its = sparse_decode.case(50, 16, 4, 4, 2, 8)
    other = its._replace(token=(its.token[0], its.token[1], its.token[2] + 1))
    its.step(other.dense)
    with pytest.raises(AssertionError, match="not close"):
        sparse_decode.assert_agree(its.step(its.dense), other.step(other.dense))


def test_a_known_prefix_gives_the_same_token(tmp_path):
    own = sparse_decode.prompt(str(tmp_path), 150, 128, 16, 2)
    assert own.store.restore(own.tokens, own.model.new_cache()) == 128
    assert own.first_token(knowing=True) == own.first_token(knowing=False)
