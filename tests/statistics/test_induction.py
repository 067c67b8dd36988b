"""InductionMass is what a loop over all pairs says, for any mask, and for queries beside a cache."""

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from tests.sampled import sampled
from tests.statistics.dense_matrices import EVERY, dense_of, matrix_of

import saccade as sc
from saccade import masks
from saccade.mechanisms import Delta, Linear
from saccade.statistics import InductionMass


def by_loop(weights, tokens):
    """Return for every query of a head ``[q_len, kv_len]`` the weights of keys after earlier ones of its token."""
    q_len, kv_len = weights.shape
    found = []
    for query in range(q_len):
        own = kv_len - q_len + query
        keys = [key for key in range(1, kv_len) if tokens[key - 1] == tokens[own] and key - 1 < own]
        found.append(sum(float(weights[query, key]) for key in keys))
    return found


def repeated(length, kinds):
    return tuple(torch.randint(kinds, (length,), generator=torch.Generator().manual_seed(length)).tolist())


@pytest.mark.parametrize("entries", [1 << 18, 20])
@pytest.mark.parametrize("kinds", [1, 3, 1000])
@pytest.mark.parametrize("case", sampled([case for case in EVERY if 0 < case.q_len <= case.kv_len], 4), ids=str)
def test_it_is_its_definition(case, kinds, entries, monkeypatch):
    monkeypatch.setattr("saccade.engine.tiles.tile_splitting._BLOCK_ENTRIES", entries)
    tokens, dense = repeated(case.kv_len, kinds), dense_of(case)
    (found,) = matrix_of(case).compute(InductionMass(tokens))
    want = [[by_loop(head, tokens) for head in item] for item in dense]
    torch.testing.assert_close(found, torch.tensor(want, dtype=torch.float64), rtol=1e-10, atol=1e-10)


@given(st.lists(st.integers(-3, 3), min_size=1, max_size=12), st.data())
def test_any_tokens_with_any_cache(tokens, data):
    kv_len = len(tokens)
    q_len = data.draw(st.integers(1, kv_len))
    q, k = torch.randn(1, 2, q_len, 4, dtype=torch.float64), torch.randn(1, 1, kv_len, 4, dtype=torch.float64)
    matrix = sc.AttentionMatrix(q, k, masks.Causal())
    (found,) = matrix.compute(InductionMass(tuple(tokens)))
    dense = matrix.to_dense()[0]
    want = torch.tensor([by_loop(head, tokens) for head in dense], dtype=torch.float64)
    torch.testing.assert_close(found[0], want)


@pytest.mark.parametrize("mechanism", [Linear(), Delta()], ids=["linear", "delta"])
def test_other_matrices(mechanism):
    q, k = torch.randn(1, 2, 20, 4), torch.nn.functional.normalize(torch.randn(1, 2, 20, 4), dim=-1)
    options = {"beta": torch.rand(1, 2, 20)} if isinstance(mechanism, Delta) else {}
    matrix, tokens = mechanism(q, k, mask=masks.Causal(), **options), repeated(20, 4)
    want = torch.tensor([by_loop(head, tokens) for head in matrix.to_dense()[0]])
    torch.testing.assert_close(matrix.compute(InductionMass(tokens))[0][0], want, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("gather", [0, 1 << 40])
@pytest.mark.parametrize(
    "mask", [masks.Causal(), masks.Full(), masks.Causal() & masks.Strided(3), masks.bigbird(8)], ids=str
)
def test_looking_pairs_up_says_what_comparing_all_weights_does(mask, gather, monkeypatch):
    monkeypatch.setattr("saccade.statistics.induction._GATHER", gather)
    monkeypatch.setattr("saccade.engine.tiles.tile_splitting._BLOCK_ENTRIES", 200)
    q, k = torch.randn(1, 2, 30, 4, dtype=torch.float64), torch.randn(1, 2, 41, 4, dtype=torch.float64)
    matrix, tokens = sc.AttentionMatrix(q, k, mask), repeated(41, 6)
    want = torch.tensor([by_loop(head, tokens) for head in matrix.to_dense()[0]], dtype=torch.float64)
    torch.testing.assert_close(matrix.compute(InductionMass(tokens))[0][0], want)


def test_a_long_text_takes_a_step_for_each_pair_of_equal_tokens(monkeypatch):
    steps = []
    looked_up = torch.Tensor.index_add_

    def counted(self, dim, index, source):
        steps.append(len(index))
        return looked_up(self, dim, index, source)

    monkeypatch.setattr(torch.Tensor, "index_add_", counted)
    length, x = 5000, torch.randn(1, 1, 5000, 2)
    tokens = tuple(range(length // 2)) * 2  # each twice
    (found,) = sc.AttentionMatrix(x, x, masks.Causal()).compute(InductionMass(tokens))
    assert sum(steps) == length // 2
    assert int((found > 0).sum()) == length // 2
    (found,) = sc.AttentionMatrix(x, x, masks.Causal()).compute(
        InductionMass((1,) * length)
    )  # one token: all but the first
    torch.testing.assert_close(
        found[0, 0, 1:] + sc.AttentionMatrix(x, x, masks.Causal())[0, 0, 1:, 0], torch.ones(length - 1)
    )


def test_a_head_of_induction_has_all_of_it():
    """A B C A B C ...: each query looks at what followed its token one period before."""
    tokens = torch.arange(12) % 3
    allowed = torch.zeros(12, 12, dtype=torch.bool)
    allowed[torch.arange(3, 12), torch.arange(1, 10)] = True
    x = torch.zeros(1, 1, 12, 4)
    found = sc.AttentionMatrix(x, x, allowed).compute(InductionMass(tuple(tokens.tolist())))[0][0, 0]
    assert found.tolist() == [0.0] * 3 + [1.0] * 9


def test_a_text_without_repeats_has_none():
    x = torch.randn(1, 1, 9, 4)
    assert not sc.AttentionMatrix(x, x).compute(InductionMass(tuple(range(9))))[0].any()


def test_numbers_of_numpy_are_taken():
    x = torch.zeros(1, 1, 4, 4)
    made = InductionMass(tuple(np.array([1, 2, 1, 2])))
    assert torch.equal(*(sc.AttentionMatrix(x, x).compute(fold)[0] for fold in (made, InductionMass((1, 2, 1, 2)))))


@pytest.mark.parametrize(
    "tokens, got",
    [
        ([1, 2], "list"),
        ("ab", "str"),
        ((1, "a"), "tuple"),
        ((1.0, 2.0), "tuple"),
        (torch.arange(2), "Tensor"),
        (3, "int"),
    ],
)
def test_tokens_that_are_no_ids(tokens, got):
    with pytest.raises(TypeError, match=rf"InductionMass: tokens must be a tuple of ints; got {got}"):
        InductionMass(tokens)


def test_tokens_that_do_not_fit():
    x = torch.randn(1, 1, 4, 4)
    with pytest.raises(ValueError, match=r"InductionMass: tokens must be one for each of 4 keys; got 3"):
        sc.AttentionMatrix(x, x).compute(InductionMass((1, 2, 3)))
    with pytest.raises(ValueError, match=r"queries must be the last of the keys; got 4 queries and 2 keys"):
        sc.AttentionMatrix(x, x[:, :, :2]).compute(InductionMass((1, 2)))
