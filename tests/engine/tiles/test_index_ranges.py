"""Parts of a tensor at ranges of indices."""

import pytest
import torch

from saccade.engine.tiles.index_ranges import at, joined, take


@pytest.mark.parametrize(
    "ranges",
    [
        (range(3, 9),),
        (range(2), range(5, 9)),
        tuple(range(start, start + 3) for start in range(2, 18, 5)),
        tuple(range(start, start + 4) for start in range(0, 20, 4)),
        tuple(range(start, start + 3) for start in (0, 5, 10, 16)),
        (range(3), range(5, 8), range(10, 13), range(15, 17)),
        tuple(range(start, start + 6, 2) for start in range(0, 20, 6)),
        tuple(range(start, start + 5) for start in range(0, 12, 2)),
    ],
    ids=str,
)
@pytest.mark.parametrize("dim", [1, 2, 3])
def test_take_is_indexing(ranges, dim):
    sizes = [2, 3, 3, 3]
    sizes[dim] = 24
    x = torch.randn(sizes)
    index = torch.tensor([number for span in ranges for number in span])
    assert torch.equal(take(x, ranges, dim), x.index_select(dim, index))


def test_neighbouring_ranges_of_one_step_become_one() -> None:
    assert joined((range(3), range(3, 5), range(6, 7))) == (range(5), range(6, 7))
    assert joined((range(1, 8, 3), range(10, 14, 3))) == (range(1, 14, 3),)
    assert joined((range(0, 4, 2), range(4, 6))) == (range(0, 4, 2), range(4, 6))
    assert joined(()) == ()


@pytest.mark.parametrize("span", [range(2, 7), range(1, 9, 3), range(4, 4)])
@pytest.mark.parametrize("dim", [0, 1, 2])
def test_at_is_a_view(span: range, dim: int) -> None:
    x = torch.randn(9, 9, 9)
    part = at(x, span, dim)
    assert torch.equal(part, x.index_select(dim, torch.tensor(list(span), dtype=torch.int64)))
    part.zero_()
    assert not x.index_select(dim, torch.tensor(list(span), dtype=torch.int64)).any()
