"""Which batch items are planned together, and rules whose step is longer than what is looked at."""

from collections.abc import Callable

import pytest
import torch

from saccade import AttentionMatrix, masks


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


LONG_STEPS: dict[str, tuple[Callable[[int], masks.Mask], Callable[[int, int, int], bool]]] = {
    "strided": (masks.Strided, lambda q, kv, step: (q - kv) % step == 0),
    "causal & strided": (lambda n: masks.Causal() & masks.Strided(n), lambda q, kv, n: q >= kv and (q - kv) % n == 0),
    "window | strided": (
        lambda n: masks.Window(2, 0) | masks.Strided(n),
        lambda q, kv, n: q - 2 <= kv <= q or q % n == kv % n,
    ),
}


@pytest.mark.parametrize("name", LONG_STEPS)
@pytest.mark.parametrize("step", [3, 100, 1 << 39])
@pytest.mark.parametrize("first", [(3, 0), (200, 0), (0, 200), (70, 64)], ids=str)
@pytest.mark.parametrize("length", [(1, 2), (2, 1), (5, 9), (40, 64)], ids=str)
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
