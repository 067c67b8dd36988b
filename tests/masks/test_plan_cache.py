"""Plans of masks: kept for values, made outside of what a compiler traces, and of masks that are no values."""

import dataclasses
from collections.abc import Callable
from typing import Any

import pytest
import torch

import saccade as sc
from saccade import masks
from saccade.masks.plan_cache import plan_of


@pytest.mark.parametrize("whole_rows", [False, True])
def test_while_a_program_is_traced_plans_are_made_outside_of_it(
    monkeypatch: pytest.MonkeyPatch, whole_rows: bool
) -> None:
    asked = masks.Causal() & (masks.Strided(3) | masks.Window(1, 0)), (2, 3, 5, 9), 4, 1, whole_rows
    expected = plan_of(*asked)
    is_traced, made = [True], []

    def outside(function: Callable[..., Any]) -> Callable[..., Any]:
        def run(*of: Any) -> Any:
            is_traced[0] = False
            made.append(function(*of))
            is_traced[0] = True
            return made[-1]

        return run

    monkeypatch.setattr(torch.compiler, "is_dynamo_compiling", lambda: is_traced[0])
    monkeypatch.setattr(torch.compiler, "disable", outside)
    assert plan_of(*asked) is expected
    assert made == [expected]
    assert {"is_full", "pairs", "tiles"} <= set(vars(expected)), "what is asked for later is there already"


@pytest.mark.parametrize("whole_rows", [False, True])
def test_plans_of_values_are_kept(whole_rows: bool) -> None:
    mask = masks.Strided(2) | masks.Window(1, 0)
    found = [plan_of(mask, (1, 1, 9, 9), 0, 0, own) for own in (whole_rows, whole_rows, not whole_rows)]
    assert found[0] is found[1]
    assert [plan.overlaps for plan in found] == [not whole_rows, not whole_rows, whole_rows]


@dataclasses.dataclass
class Upto(masks.Mask):
    """A mask of a user's own that is equal to others, may change, and has no hash."""

    last: int

    def allows(self, b: torch.Tensor, h: torch.Tensor, q: torch.Tensor, kv: torch.Tensor) -> torch.Tensor:
        return (kv <= self.last).expand(torch.broadcast_shapes(q.shape, kv.shape))


def test_a_mask_without_a_hash_is_a_mask() -> None:
    x, mask = torch.randn(1, 1, 8, 4), Upto(2)
    for last in (2, 6):
        mask.last = last
        torch.testing.assert_close(sc.attention(x, x, x, mask), sc.attention(x, x, x, masks.Prefix(last + 1)))
        assert mask.density(8) == (last + 1) / 8
