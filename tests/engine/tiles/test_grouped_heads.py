"""Products of query heads with the key heads that they share."""

import pytest
import torch

from saccade.engine.tiles.grouped_heads import groups_of, product, transposed_product


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
