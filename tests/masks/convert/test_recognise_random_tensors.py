"""Bool tensors of any kind say in rules what they say as tensors."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.masks.convert.test_recognise_tensor import _dense, _rule
from tests.masks.random_masks import MAX_LEN, expressions
from tests.masks.test_masks import _covered
from torch import Tensor

from saccade import masks
from saccade.masks.convert import recognise_tensor as finding

pytestmark = pytest.mark.usefixtures("however_small")


@st.composite
def _tensors(draw: st.DrawFn) -> Tensor:
    """Masks written out, some with a few entries turned, in several layouts of memory."""
    batch = draw(st.sampled_from([1, 2, 3]))
    q_len, kv_len = draw(st.integers(1, MAX_LEN)), draw(st.integers(1, MAX_LEN))
    if draw(st.booleans()):
        mask = draw(expressions(batch))
        allowed = mask.to_dense(q_len, kv_len, batch=batch)
    else:  # a few ranges a row, from anywhere to anywhere
        ends = draw(st.lists(st.integers(0, kv_len), min_size=2, max_size=6))
        generator = torch.Generator().manual_seed(draw(st.integers(0, 99)))
        start, stop = torch.tensor(ends[::2][: len(ends) // 2]), torch.tensor(ends[1::2])
        start, stop = (x + torch.randint(-2, 3, (batch, q_len, len(x)), generator=generator) for x in (start, stop))
        keys = torch.arange(kv_len)[:, None]
        allowed = ((keys >= start[:, :, None]) & (keys < stop[:, :, None])).any(-1)[:, None]
    for _ in range(draw(st.integers(0, 3))):
        place = [draw(st.integers(0, size - 1)) for size in allowed.shape]
        allowed[tuple(place)] ^= True
    layout = draw(st.sampled_from(["plain", "transposed", "inside", "expanded"]))
    if layout == "transposed":
        return allowed.mT.contiguous().mT
    if layout == "inside":
        wide = torch.zeros(batch, 1, q_len + 3, kv_len + 5, dtype=torch.bool)
        wide[..., 2:-1, 1:-4] = allowed
        return wide[..., 2:-1, 1:-4]
    return allowed[:1].expand(batch, 2, -1, -1) if layout == "expanded" else allowed


def _check_any_tensor(data: st.DataObject) -> None:
    allowed = data.draw(_tensors(), label="tensor")
    rule = _rule(allowed)
    assert torch.equal(_dense(rule, allowed), allowed)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(
            "saccade.masks.convert.recognise_tensor._CHUNK", data.draw(st.sampled_from([1, 64, 200, 1 << 22]))
        )
        again = finding._recognise(allowed)
        assert (again is None and isinstance(rule, masks.Dense)) or again == rule
        patch.setattr("saccade.plan.row_groups._ROW_BLOCKS", data.draw(st.sampled_from([(768, 192), (16, 7, 1), (1,)])))
        patch.setattr("saccade.plan.layout.TILE_COST", data.draw(st.sampled_from([0, 30_000])))
        assert torch.equal(_covered(rule, tuple(allowed.shape)), allowed)


@pytest.mark.ci
@settings(max_examples=100, deadline=None)
@given(data=st.data())
def test_any_tensor(data: st.DataObject) -> None:
    _check_any_tensor(data)


@pytest.mark.slow
@settings(max_examples=3_000, deadline=None)
@given(data=st.data())
def test_many_tensors(data: st.DataObject) -> None:
    _check_any_tensor(data)
