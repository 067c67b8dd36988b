"""Queries and keys that are held are those of their call, whatever happens to a cache afterwards."""

import pytest
import torch

import saccade as sc
from saccade import masks
from saccade.recording.derived_matrices import JoinedMatrices, chosen_heads
from saccade.recording.stored_matrices import StoredMatrices


def matrix_of(query, key):
    return sc.AttentionMatrix(query, key, masks.Causal())


def test_memory_that_is_written_to_again():
    query, key = torch.randn(1, 2, 4, 8), torch.randn(1, 2, 4, 8)
    expected = matrix_of(query, key).to_dense().clone()
    kept = StoredMatrices()
    kept.add(matrix_of(query, key), 0)
    query.zero_()
    key.zero_()
    assert torch.equal(kept.matrix().to_dense(), expected)


@pytest.mark.parametrize("heads", [None, [1]])
@pytest.mark.parametrize("guard", [torch.no_grad, torch.inference_mode])
@pytest.mark.parametrize("kind", ["mask", "bias"])
def test_a_mask_that_is_written_to_again(kind, guard, heads):
    with guard():
        x, allowed, bias = torch.randn(1, 2, 4, 8), torch.rand(4, 4) < 0.6, torch.randn(4, 4)
        matrix = sc.AttentionMatrix(x, x, masks.Dense(allowed), bias=bias)
        matrix = matrix if heads is None else chosen_heads(matrix, heads)
        expected = matrix.to_dense()
        kept = StoredMatrices()
        kept.add(matrix, 0)
        assert torch.equal(kept.matrix().to_dense(), expected)
        allowed.logical_not_() if kind == "mask" else bias.neg_()
        if guard is torch.inference_mode:
            assert torch.equal(kept.matrix().to_dense(), expected)
        else:
            with pytest.raises(sc.UnsupportedError, match=r"changed in place after the call(.|\n)*mask.clone"):
                kept.matrix()


def test_keys_that_a_cache_has_changed():
    query, key = torch.randn(1, 2, 6, 8), torch.randn(1, 2, 6, 8)
    other = key.clone()
    other[:, :, 1] += 1.0  # such as one that rounds old keys
    kept = StoredMatrices()
    for rows, keys in (((0, 4), key), ((4, 5), other), ((5, 6), key)):
        kept.add(matrix_of(query[:, :, slice(*rows)], keys[:, :, : rows[1]]), 0)
    first, second, third = (matrix_of(query, keys).to_dense() for keys in (key, other, key))
    expected = torch.cat([first[:, :, :4], second[:, :, 4:5], third[:, :, 5:]], 2)
    torch.testing.assert_close(kept.matrix().to_dense(), expected)


def test_positions_of_calls_that_do_not_know_where_they_stand():
    x = torch.randn(1, 1, 5, 8)
    whole = JoinedMatrices([matrix_of(x[:, :, :4], x[:, :, :4]), matrix_of(x[:, :, 4:], x[:, :, 2:])], [0, 2])
    q, kv = whole.positions(range(1, 5), (range(1, 3), range(4, 5)))
    assert q.flatten().tolist() == [1, 2, 3, 4]
    assert kv.flatten().tolist() == [1, 2, 4]
    assert whole.shape == (1, 1, 5, 5)
    assert whole.kv_heads == 1
    dense = matrix_of(x, x).to_dense()
    dense[0, 0, 4] = 0.0
    dense[0, 0, 4, 2:] = matrix_of(x[:, :, 4:], x[:, :, 2:]).to_dense()[0, 0, 0]
    torch.testing.assert_close(whole.to_dense(), dense)
    torch.testing.assert_close(whole @ x, dense @ x)


def test_positions_of_a_ragged_batch():
    x = torch.randn(2, 1, 4, 8)
    places = torch.tensor([[-1, 0, 1, 2], [0, 1, 2, 3]])

    def part(rows):
        own = {"q_positions": places[:, rows], "kv_positions": places[:, : rows.stop]}
        return sc.AttentionMatrix(x[:, :, rows], x[:, :, : rows.stop], masks.Causal(), **own)

    whole = JoinedMatrices([part(slice(0, 3)), part(slice(3, 4))], [0, 0])
    q, kv = whole.positions(range(4), (range(4),))
    assert torch.equal(q[:, 0, :, 0], places)
    assert torch.equal(kv[:, 0, 0], places)
