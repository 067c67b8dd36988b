"""Batch items are planned together or apart, whichever is cheaper."""

import pytest

from saccade import masks


@pytest.mark.parametrize("q_len", [1, 4, 512])
def test_items_of_similar_lengths_are_run_together_and_others_apart(q_len: int) -> None:
    alike, unlike = masks.Padding([4090, 4095, 4096]), masks.Padding([300, 4096, 40])
    together, apart = (mask.plan(q_len, 4096, batch=3, heads=8) for mask in (alike, unlike))
    assert {(tile.batch.start, tile.batch.stop) for tile in together.tiles} == {(0, 3)}
    assert {(tile.batch.start, tile.batch.stop) for tile in apart.tiles} == {(0, 1), (1, 2), (2, 3)}
    assert apart.pairs == 8 * q_len * (300 + 4096 + 40)


def test_few_pairs_are_run_together_whatever_the_lengths() -> None:
    plan = masks.Padding([3, 40, 9, 1]).plan(1, 40, batch=4, heads=2)
    assert [tile.batch for tile in plan.tiles] == [slice(0, 4)]
