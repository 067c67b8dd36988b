"""Positions as vectors: the sinusoids to the last digit, and a table that ends."""

import copy
import math

import pytest
import torch
from torch import nn

from saccade.positions import Learned, Sinusoidal


@pytest.mark.parametrize("base", [10000.0, 50.0])
def test_sinusoids_are_the_definition_to_the_last_digit_at_a_million(base: float) -> None:
    places = [0, 1, 2, 77, 999_983, 1_000_000]
    own = Sinusoidal(12, base=base)(torch.tensor(places))
    expected = torch.tensor(
        [[(math.cos if c % 2 else math.sin)(p / base ** ((c - c % 2) / 12)) for c in range(12)] for p in places],
        dtype=torch.float64,
    )
    assert own.dtype == torch.float32
    torch.testing.assert_close(own.double(), expected, rtol=1e-7, atol=1e-9)
    wide = Sinusoidal(12, base=base).double()(torch.tensor(places))
    torch.testing.assert_close(wide, expected, rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize("make", [lambda: Sinusoidal(6), lambda: Learned(40, 6)], ids=["sinusoidal", "learned"])
def test_promises_of_both_encodings(make: object) -> None:
    encoding = make()
    row = encoding(torch.arange(5, 9))
    assert row.shape == (4, 6)
    torch.testing.assert_close(encoding(range(5, 9)), row, rtol=0, atol=0)
    assert encoding(torch.tensor(7)).shape == (6,)
    torch.testing.assert_close(encoding(torch.tensor(7)), row[2], rtol=0, atol=0)
    torch.testing.assert_close(encoding(torch.arange(5, 9).expand(2, 3, 4))[1, 2], row, rtol=0, atol=0)
    assert encoding(torch.zeros(0, dtype=torch.int64)).shape == (0, 6)
    some = encoding(torch.tensor([[-1, 5], [8, -1]]))
    assert some[0, 0].eq(0).all()
    assert some[1, 1].eq(0).all()
    torch.testing.assert_close(some[1, 0], row[3], rtol=0, atol=0)
    for dtype in (torch.float64, torch.bfloat16, torch.float16):
        assert copy.deepcopy(encoding).to(dtype)(torch.arange(3)).dtype == dtype
    fresh = make()
    fresh.load_state_dict(encoding.state_dict())
    torch.testing.assert_close(fresh(range(9)), encoding(range(9)), rtol=0, atol=0)
    compiled = torch.compile(encoding, backend="eager", fullgraph=True)
    torch.testing.assert_close(compiled(torch.arange(5, 9)), row, rtol=0, atol=0)


@pytest.mark.parametrize("make", [lambda: Sinusoidal(6), lambda: Learned(40, 6)], ids=["sinusoidal", "learned"])
def test_positions_of_another_kind_are_refused(make: object) -> None:
    encoding = make()
    with pytest.raises(TypeError, match=r": positions must be a range, an int64 tensor or a list of ints; got f"):
        encoding(torch.zeros(3))
    with pytest.raises(TypeError, match=r": positions must be a range, an int64 tensor or a list of ints; got int\."):
        encoding(3)
    with pytest.raises(ValueError, match=r": positions must be at least -1; got a smaller position\."):
        encoding(torch.tensor([-2]))


def test_sinusoids_have_nothing_to_store() -> None:
    encoding = Sinusoidal(6)
    assert encoding.state_dict() == {}
    assert list(encoding.parameters()) == []
    assert str(encoding) == "Sinusoidal(6, base=10000)"


def test_learned_vectors_are_an_embedding_that_converts() -> None:
    theirs, ours = nn.Embedding(40, 6), Learned(40, 6)
    ours.load_state_dict(theirs.state_dict())
    place = torch.tensor([[3, 39], [0, 3]])
    torch.testing.assert_close(ours(place), theirs(place), rtol=0, atol=0)
    assert str(ours) == "Learned(40, 6)"


def test_learned_vectors_start_small_and_learn_where_tokens_stand() -> None:
    encoding = Learned(2000, 50)
    assert encoding.weight.std().item() == pytest.approx(0.02, rel=0.02)
    place = torch.tensor([4, -1, 4, 9])
    encoding(place).sum().backward()
    touched = encoding.weight.grad.ne(0).any(-1).nonzero()[:, 0]
    assert touched.tolist() == [4, 9]
    assert encoding.weight.grad[4].eq(2).all()


@pytest.mark.parametrize("place", [torch.tensor([0, 8]), range(9), torch.tensor([[100]])], ids=str)
def test_a_learned_table_says_where_it_ends(place: object) -> None:
    encoding = Learned(8, 4)
    with pytest.raises(ValueError, match=r"Learned: positions must be below 8; got a larger position\.") as caught:
        encoding(place)
    assert "Sinusoidal" in str(caught.value)


@pytest.mark.parametrize(
    ("make", "sentence"),
    [
        (lambda: Sinusoidal(0), "Sinusoidal: embed_dim must be an int of at least 1; got 0."),
        (lambda: Sinusoidal(7), "Sinusoidal: embed_dim must be even; got 7."),
        (lambda: Sinusoidal(8, base=0.5), "Sinusoidal: base must be a finite number above 1; got 0.5."),
        (lambda: Learned(0, 8), "Learned: max_len must be an int of at least 1; got 0."),
        (lambda: Learned(8, 1.0), "Learned: embed_dim must be an int of at least 1; got 1.0."),
    ],
)
def test_sizes_are_refused_in_sentences(make: object, sentence: str) -> None:
    with pytest.raises(ValueError, match="must") as caught:
        make()
    assert str(caught.value).split("\n")[0] == sentence
