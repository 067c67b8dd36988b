"""Tensors as masks, of every size and asked about any positions, entry by entry."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from saccade import masks
from saccade.masks.grid.grid import Squares
from saccade.masks.grid.row_order import GridSize, InOrder, RowOrder

SIZES = [
    (1, 1, 1, 1),
    (1, 1, 1, 2),
    (1, 1, 2, 1),
    (1, 1, 2, 2),
    (1, 1, 2, 5),
    (1, 1, 4, 2),
    (2, 1, 3, 3),
    (1, 2, 3, 4),
    (2, 2, 1, 4),
    (3, 3, 2, 3),
]


def _entry(table: Tensor, b: int, h: int, q: int, kv: int) -> bool:
    batch, heads, rows, columns = table.shape
    row, column = (0 if rows == 1 else q - (columns - rows)), (0 if rows == columns == 1 else kv)
    inside = 0 <= row < rows and 0 <= column < columns
    return inside and bool(table[b if batch > 1 else 0, h if heads > 1 else 0, row, column])


@pytest.mark.parametrize("many", [1, 1 << 16], ids=["together", "one by one"])
@pytest.mark.parametrize("sizes", SIZES, ids=str)
def test_every_entry_is_read_where_it_stands(
    sizes: tuple[int, int, int, int], many: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("saccade.masks.rules.dense._MANY", many)
    generator = torch.Generator().manual_seed(0)
    tables = [torch.ones(sizes, dtype=torch.bool), torch.rand(sizes, generator=generator) < 0.5]
    for table in tables:
        mask, (batch, heads, rows, columns) = masks.Dense(table), sizes
        own = range(columns - rows, columns)
        elsewhere = [range(first, first + rows) for first in (rows - columns, columns + rows)]
        for q, kv in (*((some, range(columns)) for some in (own, *elsewhere)), (range(-9, 9), range(-9, 9))):
            expected = [
                [[[_entry(table, b, h, i, j) for j in kv] for i in q] for h in range(heads)] for b in range(batch)
            ]
            at = (range(batch), range(heads), q, kv)
            index = [torch.tensor(x).view([-1 if axis == own else 1 for axis in range(4)]) for own, x in enumerate(at)]
            assert torch.equal(mask.allows(*index).expand(torch.tensor(expected).shape), torch.tensor(expected))


@pytest.mark.parametrize("shape", [(0, 4), (4, 0), (0, 0)])
def test_a_tensor_without_entries_allows_nothing(shape: tuple[int, int]) -> None:
    assert not masks.Dense(torch.ones(shape, dtype=torch.bool)).to_dense(3, 5).any()


def test_large_answers_under_vmap(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("saccade.masks.rules.dense._MANY", 1)
    table = torch.rand(6, 6, generator=torch.Generator().manual_seed(0)) < 0.5
    mask, zero, kv = masks.Dense(table), torch.zeros(1, 1, 1, 1, dtype=torch.int64), torch.arange(6).view(1, 1, 1, 6)
    rows = torch.arange(6).view(3, 1, 1, 2, 1)
    found = torch.vmap(lambda q: mask.allows(zero, zero, q, kv))(rows)
    assert torch.equal(found.reshape(6, 6), table)
    found = torch.vmap(lambda own: masks.Dense(own).allows(zero, zero, rows.view(1, 1, 6, 1), kv))(
        torch.stack([table, ~table])
    )
    assert torch.equal(found.reshape(2, 6, 6), torch.stack([table, ~table]))


ORDER = RowOrder(GridSize(3, 3, 0), Squares(2, 2), 0, 9)


@pytest.mark.parametrize("mask", [masks.Dense(torch.ones(9, 9).bool()), InOrder(masks.Causal(), ORDER)], ids=str)
def test_a_rule_is_asked_where_its_positions_are(mask: masks.Mask) -> None:
    zero, index = torch.zeros(1, dtype=torch.int64, device="meta"), torch.arange(9, device="meta")
    assert mask.allows(zero, zero, index[:, None], index).device.type == "meta"


@settings(max_examples=200, deadline=None)
@given(data=st.data())
def test_entries_that_stand_together_are_read_as_others_are(data: st.DataObject) -> None:
    sizes = [data.draw(st.integers(1, most)) for most in (3, 2, 6, 6)]
    mask = masks.Dense(torch.rand(sizes, generator=torch.Generator().manual_seed(0)) < 0.5)
    shift = sizes[3] - sizes[2] if sizes[2] > 1 else 0
    index = []
    for axis, size in enumerate(sizes):
        start, step = data.draw(st.integers(0 if axis < 2 else -2, size)), data.draw(st.sampled_from([1, 1, 1, 2, -1]))
        own = torch.arange(start, start + step * data.draw(st.integers(0, size + 1)), step)
        own = own.clamp(0, size - 1) if axis < 2 else own + (shift if axis == 2 else 0)
        index.append(own.reshape([-1 if other == axis else 1 for other in range(4)]))
    expected = mask.allows(*index)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("saccade.masks.rules.dense._MANY", 1)
        found = mask.allows(*index)
    assert torch.equal(*torch.broadcast_tensors(found, expected))
    assert found.untyped_storage().data_ptr() != mask.allowed.untyped_storage().data_ptr() or not found.numel()
