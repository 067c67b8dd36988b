"""The softmax over entries and tokens: its mask against the definition, pair by pair, and its plan at length."""

import dataclasses

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from saccade import masks
from saccade.mechanisms.entry_softmax import EntriesAndWindow, EntrySoftmax
from saccade.plan import Box, Groups
from saccade.plan.key_ranges import KeyDomain

Case = tuple[EntriesAndWindow, np.ndarray]


@st.composite
def cases(draw: st.DrawFn) -> Case:
    """Return a mask, and which of its columns (entries, then tokens) each of the last queries sees."""
    size, window = draw(st.integers(1, 5)), draw(st.integers(1, 6))
    start, q_len = draw(st.integers(0, 12)), draw(st.integers(1, 12))
    stored = draw(st.integers(min(start, window - 1), start))  # tokens before the queries
    length = draw(st.none() | st.integers(0, start + q_len))
    last = draw(st.none() | st.integers(1, 3))
    entries = (start + q_len) // size
    seen = np.zeros((q_len, entries + stored + q_len), dtype=bool)
    for i, t in enumerate(range(start, start + q_len)):
        finished = [e for e in range(entries) if (e + 1) * size - 1 <= t]
        for e in finished if last is None else finished[-last:]:
            seen[i, e] = length is None or (e + 1) * size <= length
        for j in range(max(start - stored, t - window + 1), t + 1):
            seen[i, entries + j - (start - stored)] = length is None or j < length
    rule = masks.Causal() if length is None else masks.Causal() & masks.Padding([length])
    return EntriesAndWindow(rule, entries, entries + stored - start, window, size, last), seen


@settings(deadline=None, max_examples=60)
@given(cases())
def test_a_query_sees_finished_blocks_and_the_last_tokens(case: Case) -> None:
    mask, seen = case
    q_len, kv_len = seen.shape
    dense = mask.to_dense(q_len, kv_len)[0, 0].numpy()
    np.testing.assert_array_equal(dense, seen)
    assert mask.is_causal
    query, key = torch.randn(1, 2, q_len, 4), torch.randn(1, 1, kv_len, 4)
    matrix = EntrySoftmax(mask.block_size, mask.window, sink_logit=2)(
        query, key, mask=mask.rule, entries=mask.entries, start=kv_len - q_len - mask.offset
    )
    if mask.last is None:
        np.testing.assert_array_equal((matrix.to_dense()[0, 0] > 0).numpy(), seen)


@settings(deadline=None, max_examples=60)
@given(cases(), st.data())
def test_bounds_and_boxes_are_those_of_the_pairs(case: Case, data: st.DataObject) -> None:
    mask, seen = case
    (q_len, kv_len), before = seen.shape, seen.shape[1] - seen.shape[0]
    edges = sorted({0, q_len, *data.draw(st.lists(st.integers(0, q_len), max_size=3))})
    first, stop = np.array(edges[:-1]), np.array(edges[1:])
    groups = Groups(np.zeros_like(first), first + before, stop - 1 + before)
    domain = KeyDomain(np.zeros_like(first), np.full_like(first, kv_len))
    any_row, all_rows = mask.bounds(groups, domain)
    for group, rows in enumerate(map(slice, first, stop)):
        possible, sure = (np.zeros(kv_len, dtype=bool) for _ in range(2))
        for flags, spans in ((possible, any_row), (sure, all_rows)):
            for low, high in zip(spans.starts[group], spans.ends[group], strict=True):
                flags[low:high] = True
        assert not (seen[rows].any(0) & ~possible).any()
        assert not (sure & ~seen[rows].all(0)).any()
    tables: dict[object, np.ndarray] = {}
    for _ in range(6):
        rows = range(data.draw(st.integers(0, q_len - 1)), q_len)[: data.draw(st.integers(1, 4))]
        keys = range(data.draw(st.integers(0, kv_len - 1)), kv_len)[: data.draw(st.integers(1, 4))]
        allowed = seen[rows.start : rows.stop, keys.start : keys.stop]
        partial = mask.partial(Box(0, range(rows.start + before, rows.stop + before), keys))
        if isinstance(partial, bool):
            assert (allowed == partial).all()
        else:
            np.testing.assert_array_equal(tables.setdefault(partial, allowed), allowed)


def test_a_plan_at_length_contains_few_hidden_pairs() -> None:
    n, size, window = 1 << 16, 128, 128
    query, key = torch.empty(1, 1, n, 4, device="meta"), torch.empty(1, 1, n // size + n, 4, device="meta")
    plan = EntrySoftmax(size, window)(query, key, entries=n // size).inputs.plan
    visible = n * window - window * (window - 1) // 2 + sum((t + 1) // size for t in range(n))
    assert visible < plan.pairs < 1.5 * visible


def test_other_masks_are_refused() -> None:
    softmax = EntrySoftmax(4, 5)
    assert softmax.reasons(masks.Causal() & masks.Padding([3])) == ()
    assert "Documents is neither" in softmax.reasons(masks.Documents([3]))[0]
    assert "Padding is not causal" in softmax.reasons(masks.Padding([3]))[0]
    x = torch.randn(1, 1, 3, 4)
    with pytest.raises(NotImplementedError, match="Documents is neither Causal nor padding on the right"):
        softmax(x, x, mask=masks.Documents([3]))
    with pytest.raises(ValueError, match="positions must be None, because the columns determine them"):
        softmax(x, x, q_positions=range(3), kv_positions=range(3))


@pytest.mark.parametrize("change", [{"window": 6}, {"offset": 4}, {"last": 2}])
def test_masks_are_values(change: dict[str, int]) -> None:
    mask = EntriesAndWindow(masks.Causal(), 3, 3, 5, 4)
    assert mask == dataclasses.replace(mask)
    assert mask != dataclasses.replace(mask, **change)
    assert str(mask) == "Causal() with the last 5 tokens and 3 entries of 4 tokens"
