"""Parts of a tensor at ranges."""

import pytest
import torch

from saccade.engine.tiles.grouped_heads import at, groups_of, joined, product, take, transposed_product


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


@pytest.mark.parametrize(("heads", "groups"), [(6, 6), (6, 3), (6, 2), (6, 1)])
def test_products_are_those_of_each_head_with_its_group(heads: int, groups: int) -> None:
    left, right, other = (torch.randn(2, n, *size) for n, *size in ((heads, 4, 5), (groups, 5, 3), (heads, 4, 3)))
    own = [head // (heads // groups) for head in range(heads)]
    want = torch.stack([left[:, head] @ right[:, group] for head, group in enumerate(own)], 1)
    torch.testing.assert_close(product(left, right), want)
    each = [left[:, head].mT @ other[:, head] for head in range(heads)]
    sums = [sum(each[head] for head in range(heads) if own[head] == group) for group in range(groups)]
    torch.testing.assert_close(transposed_product(left, other, groups), torch.stack(sums, 1))
    for start, stop in [(0, heads), (0, heads // groups), (heads - heads // groups, heads), (1, 2)]:
        assert groups_of(slice(start, stop), heads, groups) == slice(own[start], own[stop - 1] + 1)


def test_as_many_rows_as_groups_are_shared_like_any() -> None:
    left, right = torch.randn(2, 6, 3, 5), torch.randn(2, 3, 5, 4)
    torch.testing.assert_close(product(left, right), left @ right.repeat_interleave(2, 1))


def test_no_heads_read_no_groups() -> None:
    assert groups_of(slice(0, 0), 0, 0) == slice(0, 0)


@pytest.mark.parametrize("span", [range(2, 7), range(1, 9, 3), range(4, 4)])
@pytest.mark.parametrize("dim", [0, 1, 2])
def test_at_is_a_view(span: range, dim: int) -> None:
    x = torch.randn(9, 9, 9)
    part = at(x, span, dim)
    assert torch.equal(part, x.index_select(dim, torch.tensor(list(span), dtype=torch.int64)))
    part.zero_()
    assert not x.index_select(dim, torch.tensor(list(span), dtype=torch.int64)).any()
