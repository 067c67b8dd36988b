"""Tests of the batch items that are planned together, and of strided rules with steps longer than the sequence."""

from collections.abc import Callable

import pytest
import torch

from saccade import AttentionMatrix, masks
from saccade.plan import Triangle


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


@pytest.mark.parametrize(
    ("mask", "is_known"),
    [
        (masks.Full(), True),
        (masks.Causal(), True),
        (masks.Window(8, 8), True),
        (masks.Window(8, 7), True),
        (masks.Window(7, 8), True),
        (masks.Prefix(9), True),
        (masks.Causal() | masks.Prefix(8), True),
        (masks.Padding([9, 9]), True),
        (masks.Padding([9, 8]), True),
        (masks.Documents([9]), True),
        (masks.Documents([8, 1]), True),
        (masks.Blocks([[True]], 9), True),
        (masks.Strided(2) | masks.Window(9, 9), False),  # of two terms nobody looks which pairs both have
        (masks.Dense(torch.ones(9, 9, dtype=torch.bool)), False),
    ],
    ids=str,
)
@pytest.mark.parametrize("shape", [(9, 9), (1, 9), (9, 1), (1, 1), (2, 9), (0, 9), (9, 0)], ids=str)
def test_a_plan_is_full_where_everyone_sees_everyone(mask: masks.Mask, is_known: bool, shape: tuple[int, int]) -> None:
    plan = mask.plan(*shape, batch=2, heads=1)
    everyone = bool(mask.to_dense(*shape, batch=2).all())
    assert plan.is_full <= everyone
    assert plan.is_full == everyone or not is_known


def test_a_plan_without_rows_is_full() -> None:
    assert masks.Strided(2).plan(0, 9).is_full
    assert (masks.Strided(2) | masks.Window(1, 1)).plan(9, 0).is_full
    assert not (masks.Strided(2) | masks.Window(1, 1)).plan(9, 9).is_full


def test_triangles_that_are_square() -> None:
    found = {(rows, columns, offset) for rows in (3, 4) for columns in (3, 4) for offset in (-1, 0, 1)}
    square = {sizes for sizes in found if Triangle(*sizes).is_square}
    assert square == {(3, 3, 0), (4, 4, 0)}


LONG_STEPS: dict[str, tuple[Callable[[int], masks.Mask], Callable[[int, int, int], bool]]] = {
    "strided": (masks.Strided, lambda q, kv, step: (q - kv) % step == 0),
    "causal & strided": (lambda n: masks.Causal() & masks.Strided(n), lambda q, kv, n: q >= kv and (q - kv) % n == 0),
    "window | strided": (
        lambda n: masks.Window(2, 0) | masks.Strided(n),
        lambda q, kv, n: q - 2 <= kv <= q or q % n == kv % n,
    ),
}


@pytest.mark.ci
@pytest.mark.parametrize("name", LONG_STEPS)
@pytest.mark.parametrize("step", [3, 7, 100, 1 << 39])
@pytest.mark.parametrize("first", [(0, 0), (3, 0), (200, 0), (0, 200), (70, 64)], ids=str)
@pytest.mark.parametrize("length", [(1, 2), (2, 1), (5, 9), (9, 5), (40, 64)], ids=str)
def test_steps_longer_than_what_is_looked_at(
    name: str, step: int, first: tuple[int, int], length: tuple[int, int]
) -> None:
    make, rule = LONG_STEPS[name]
    rows, columns = (range(start, start + size) for start, size in zip(first, length, strict=True))
    query, key = torch.zeros(1, 1, length[0], 4), torch.zeros(1, 1, length[1], 4)
    matrix = AttentionMatrix(query, key, make(step), q_positions=rows, kv_positions=columns)
    allowed = torch.tensor([[rule(q, kv, step) for kv in columns] for q in rows])
    weights = allowed / allowed.sum(-1, keepdim=True).clamp(min=1)
    torch.testing.assert_close((matrix @ torch.eye(length[1])[None, None])[0, 0], weights)
