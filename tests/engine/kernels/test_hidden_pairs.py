"""Tests of the hidden pairs that a plan keeps: they are computed once, fit the memory limit, and follow the rule."""

import dataclasses

import pytest
import torch

import saccade as sc
from saccade import masks
from saccade.engine.inputs import AttentionInputs
from saccade.engine.kernels import tiled_cost as blocks
from saccade.testing import oracle

ASKED = []


@dataclasses.dataclass(frozen=True)
class ForEach(masks.Mask):
    """A rule that is the same for all batch items and heads, but has an entry for each; other numbers share no plan."""

    number: int

    def allows(self, b, h, q, kv):
        ASKED.append(self.number)
        return ((q * kv + self.number) % 5 != 0) & (b >= 0) & (h >= 0)


@pytest.fixture
def small_blocks(monkeypatch):
    monkeypatch.setattr(blocks, "_ROWS", 5)
    monkeypatch.setattr(blocks, "_ENTRIES", 200)


def inputs():
    return [torch.randn(3, heads, 11, 8, dtype=torch.float64).requires_grad_() for heads in (4, 2, 2)]


def test_a_rule_that_tells_none_apart_may_answer_for_each():
    tensors, mask = inputs(), ForEach(1)
    out = sc.attention(*tensors, mask, impl="tiled")
    want, _ = oracle.attention(*tensors, mask.to_dense(11, 11, batch=3, heads=4))
    torch.testing.assert_close(out, want)
    torch.testing.assert_close(*(torch.autograd.grad(x.sin().sum(), tensors) for x in (out, want)))


@pytest.mark.usefixtures("small_blocks")
def test_a_rule_that_is_a_value_is_asked_once():
    tensors, mask = inputs(), ForEach(2)
    first = sc.attention(*tensors, mask, impl="tiled")
    assert ASKED.count(2)
    ASKED.clear()
    second = sc.attention(*tensors, mask, impl="tiled")
    second.sum().backward()
    assert ASKED == []
    assert torch.equal(first, second)


@pytest.mark.parametrize("room", [0, 60, 1000])
@pytest.mark.usefixtures("small_blocks")
def test_no_more_is_kept_than_there_is_room_for(room, monkeypatch):
    monkeypatch.setattr("saccade.engine.tiles.tile_scores.ROOM_FOR_HIDDEN", room)
    tensors, mask = [x.detach() for x in inputs()], ForEach(3 + room)
    for _ in range(2):
        sc.attention(*tensors, mask, impl="tiled")
    memo = AttentionInputs.of(*tensors[:2], mask).plan.memo
    kept = sum(x.numel() for x in memo.values() if isinstance(x, torch.Tensor))
    assert kept == {0: 0, 60: 55, 1000: 121}[room]  # blocks of 5 rows, 5 and 1, of 11 keys each
