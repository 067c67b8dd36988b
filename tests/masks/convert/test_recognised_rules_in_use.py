"""Tests of rules in place of bool tensors: they agree with the tensor everywhere, and tensors are read in pieces."""

import pytest
import torch
from torch import Tensor

from saccade import masks
from saccade.masks.convert import recognise_tensor as finding

pytestmark = pytest.mark.usefixtures("however_small")
N = 12
TRIL = torch.ones(N, N, dtype=torch.bool).tril()
SINKS = TRIL & (TRIL.triu(-3) | (torch.arange(N) < 2))
HOLES = (torch.arange(N) < torch.tensor([12, 5, 4])[:, None]) & (torch.arange(N) != 3)


@pytest.mark.parametrize("size", [(1, 5), (3, 5), (5, 5)])
@pytest.mark.parametrize("product", [(1, 5), (3, 5), (5, 5), (3, 7), (5, 7), (7, 5), (5, 3)])
@pytest.mark.parametrize("origin", [(0, 0), (2, 0), (4, 0), (0, 2), (2, 2)])
def test_a_recognised_rule_in_use_equals_the_tensor(
    size: tuple[int, int], product: tuple[int, int], origin: tuple[int, int]
) -> None:
    """Rows and columns outside of the tensor stay hidden, though the rule that was found would show some."""
    mask = masks.Dense(torch.ones(size, dtype=torch.bool))
    found = finding.recognise_tensors(mask, (1, 1, *product), origin)
    places = {
        name: range(first, first + size)
        for name, first, size in zip(("q_positions", "kv_positions"), origin, product, strict=True)
    }
    assert torch.equal(found.to_dense(*product, **places), mask.to_dense(*product, **places))


ALIKE: dict[str, tuple[Tensor, str]] = {
    "items": (SINKS.expand(4, 1, N, N).contiguous(), "KeyRanges(items=1, rows=12, columns=12, at_most=2)"),
    "rows": (HOLES[:, None, None].expand(3, 1, N, N).contiguous(), "KeyRanges(items=3, rows=1, columns=12, at_most=2)"),
    "columns": (TRIL[:, 3:4].expand(N, N), "KeyRanges(items=1, rows=12, columns=12, at_most=1)"),
}


@pytest.mark.parametrize("name", ALIKE)
def test_equal_tensors_are_recognised_once(name: str) -> None:
    allowed, expected = ALIKE[name]
    mask = masks.Dense(allowed)
    batch, heads, rows, columns = mask.allowed.shape
    found = finding.recognise_tensors(mask, (batch, heads, rows, columns), (columns - rows, 0))
    assert str(found) == expected
    assert torch.equal(found.to_dense(rows, columns, batch=batch), mask.allowed)


@pytest.mark.parametrize("at_once", [1, 7, 13, 30, 100])
def test_tensors_are_read_piece_by_piece(at_once: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("saccade.masks.convert.recognise_tensor._CHUNK", at_once)
    rows = torch.arange(6)[:, None]
    first, last = (rows * torch.tensor([1, 2, 0])[:, None, None] % 5 for _ in range(2))
    allowed = ((torch.arange(7) >= first) & (torch.arange(7) <= last + 1))[:, None]
    found = finding._recognise(allowed)
    assert found is not None
    assert torch.equal(found.to_dense(6, 7, batch=3), allowed)


def test_few_views_of_one_tensor_are_kept() -> None:
    allowed = TRIL.clone()
    for size in range(1, N + 1):
        part = masks.Dense(allowed[:size, :size])
        finding.recognise_tensors(part, (1, 1, size, size), (0, 0))
        assert len(finding._cache[allowed].patterns) <= finding._MAX_VIEWS
