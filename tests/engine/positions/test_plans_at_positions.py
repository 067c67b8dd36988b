"""Masks read at positions: every plan holds what the definition allows, and no more than the tables need."""

from collections.abc import Sequence

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.masks import brute_force
from tests.masks.random_masks import MAX_LEN, anywhere, expressions
from torch import Tensor

import saccade as sc
from saccade import masks
from saccade.caches import KVCache, padded_positions
from saccade.engine.positions.positioned_mask import PositionedMask
from saccade.mechanisms import Softmax
from saccade.plan import Triangle, make
from saccade.positions.token_positions import Positions

CPU = torch.device("cpu")


@st.composite
def _item(draw: st.DrawFn, length: int, *, is_sorted: bool) -> list[int]:
    """Positions of one batch item: as caches write them, or anything at all."""
    kind = draw(st.sampled_from(["left", "right", "middle", "gaps", "holes"]))
    if not is_sorted:
        return draw(st.lists(st.integers(-1, MAX_LEN - 1), min_size=length, max_size=length))
    tokens = draw(st.integers(0, length))
    first = draw(st.integers(0, MAX_LEN - length))
    padding, text = [-1] * (length - tokens), list(range(first, first + tokens))
    if kind == "left":
        return padding + text
    if kind == "right":
        return text + padding
    if kind == "middle":  # right-padded, then continued
        cut = draw(st.integers(0, tokens))
        return text[:cut] + padding + text[cut:]
    there = draw(st.lists(st.just(True) if kind == "gaps" else st.booleans(), min_size=length, max_size=length))
    steps = draw(st.lists(st.sampled_from([0, 1, 1, 1, 3]), min_size=length, max_size=length))
    position, item = 0, []
    for is_there, step in zip(there, steps, strict=True):
        position = min(position + step, MAX_LEN - 1)
        item.append(position if is_there else -1)
    return item


@st.composite
def _tables(draw: st.DrawFn, batch: int) -> tuple[Tensor, Tensor]:
    """int64 ``[batch | 1, q_len]`` and ``[batch | 1, kv_len]``, on their own or the same for both."""
    kv_len = draw(st.integers(1, 24))
    is_sorted = draw(st.sampled_from([True, True, True, False]))
    kv = [draw(_item(kv_len, is_sorted=is_sorted)) for _ in range(draw(st.sampled_from([1, batch])))]
    q_len = draw(st.one_of(st.just(1), st.integers(1, 4), st.integers(1, 24)))
    if draw(st.booleans()):
        return torch.tensor(kv)[:, -q_len:].clone(), torch.tensor(kv)
    q = [draw(_item(q_len, is_sorted=is_sorted)) for _ in range(draw(st.sampled_from([1, batch])))]
    return torch.tensor(q), torch.tensor(kv)


def _defined(mask: masks.Mask, batch: int, q: Tensor, kv: Tensor) -> Tensor:
    """bool ``[batch, q_len, kv_len]``, by loops."""
    allows = brute_force.rule(mask)
    tables = (q.expand(batch, -1).tolist(), kv.expand(batch, -1).tolist())
    rows = [
        [[i >= 0 and j >= 0 and allows(b, i, j) for j in keys] for i in queries]
        for b, (queries, keys) in enumerate(zip(*tables, strict=True))
    ]
    return torch.tensor(rows, dtype=torch.bool)


def _covered(rule: PositionedMask, shape: tuple[int, int, int, int]) -> Tensor:
    """Write a plan out; on the way, check that its promises about strips and residual keys hold."""
    batch, heads, q_len, kv_len = shape
    plan = make(rule, shape, q_first=0, kv_first=0)
    allowed = rule.to_dense(q_len, kv_len, batch=batch, heads=heads, q_positions=torch.arange(q_len))
    got, times = torch.zeros(shape, dtype=torch.bool), torch.zeros(batch, q_len)
    contents: dict[object, Tensor] = {}
    for tile in plan.tiles:
        rows = slice(tile.rows.start, tile.rows.stop, tile.rows.step)
        times[tile.batch, rows] += 1
        for strip in tile.columns:
            columns = slice(strip.keys.start, strip.keys.stop, strip.keys.step)
            part = allowed[tile.batch, tile.heads, rows, columns]
            got[tile.batch, tile.heads, rows, columns] |= part
            if isinstance(strip.partial, Triangle):
                key = strip.partial
                triangle = torch.ones(key.rows, key.columns, dtype=torch.bool).tril(key.offset)
                assert torch.equal(part, triangle.expand_as(part))
            assert strip.partial is not True or bool(part.all())
            assert strip.partial is True or torch.equal(contents.setdefault(strip.partial, part), part)
    assert bool((times == 1).all())
    return got


FREQUENT = [
    masks.Full(),
    masks.Causal(),
    masks.Window(4, 0),
    masks.Window(3, 2),
    masks.Prefix(5),
    masks.streaming(2, 4),
    masks.Strided(3) & masks.Causal(),
]


def _check_a_random_table(data: st.DataObject) -> None:
    batch = data.draw(st.sampled_from([1, 2, 3]), label="batch")
    mask = data.draw(st.one_of(st.sampled_from(FREQUENT), expressions(batch)), label="mask")
    q, kv = data.draw(_tables(batch), label="tables")
    blocks = data.draw(st.sampled_from([(768, 192, 48, 12, 1), (16, 7, 1), (5, 1), (1,)]), label="blocks")
    price = data.draw(st.sampled_from([0, 10, 30_000]), label="price of a tile")
    few = data.draw(st.sampled_from([0, 16]), label="few rows")
    shape = (max(batch, mask.shape[0]), 1, q.shape[1], kv.shape[1])
    expected = _defined(mask, shape[0], q, kv)
    query, key, value = (torch.randn(shape[0], 2, length, 4) for length in (shape[2], shape[3], shape[3]))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("saccade.plan.row_groups._ROW_BLOCKS", blocks)
        patch.setattr("saccade.plan.layout.TILE_COST", price)
        patch.setattr("saccade.engine.positions.positioned_mask._FEW_ROWS", few)
        patch.setattr("saccade.engine.positions.positioned_mask._FEWEST", 0)
        patch.setattr(
            "saccade.engine.positions.position_index._MOST_RUNS", data.draw(st.sampled_from([1, 16]), label="runs")
        )
        assert torch.equal(_covered(PositionedMask(mask, q, kv), shape)[:, 0], expected)
        out = sc.attention(query, key, value, anywhere(mask), q_positions=q, kv_positions=kv)
    torch.testing.assert_close(out.double(), _attended(query, key, value, expected), atol=1e-5, rtol=1e-5)


def _attended(query: Tensor, key: Tensor, value: Tensor, allowed: Tensor) -> Tensor:
    """Compute dense attention in float64."""
    q, k, v = query.double(), key.double(), value.double()
    scores = (q @ k.mT / query.shape[3] ** 0.5).masked_fill(~allowed[:, None], -torch.inf)
    empty = ~allowed.any(-1)[:, None, :, None]
    return scores.masked_fill(empty, 0.0).softmax(-1).masked_fill(empty, 0.0) @ v


@pytest.mark.ci
@settings(max_examples=40, deadline=None)
@given(data=st.data())
def test_any_table_is_the_definition(data: st.DataObject) -> None:
    _check_a_random_table(data)


@pytest.mark.slow
@settings(max_examples=10_000, deadline=None)
@given(data=st.data())
def test_many_tables_are_the_definition(data: st.DataObject) -> None:
    _check_a_random_table(data)


@pytest.mark.parametrize("mask", FREQUENT, ids=str)
@pytest.mark.parametrize("price", [0, 30_000])
def test_gaps_and_repetitions_are_not_taken_for_tokens(mask: masks.Mask, price: int) -> None:
    """The items span the same positions, in which other ones are missing or stand twice."""
    table = torch.tensor([[0, 1, 3, 4, 5, 9, 10, 12], [0, 2, 3, 4, 8, 9, 11, 12], [0, 0, 1, 5, 6, 6, 6, 12]])
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("saccade.plan.layout.TILE_COST", price)
        patch.setattr("saccade.engine.positions.positioned_mask._FEWEST", 0)
        for items in (slice(0, 3), slice(0, 1), slice(1, 2), slice(2, 3)):
            own = table[items]
            got = _covered(PositionedMask(mask, own, own), (len(own), 1, 8, 8))
            assert torch.equal(got[:, 0], _defined(mask, len(own), own, own))


LENGTHS = [2048, 1700, 3, 2000]
WINDOW = 64


def _pairs(mask: masks.Mask, q: Tensor, kv: Tensor, heads: int = 2) -> int:
    shape = (len(kv), heads, q.shape[1], kv.shape[1])
    return make(
        PositionedMask.of(mask, Positions.of(q, "q"), Positions.of(kv, "kv"), CPU), shape, q_first=0, kv_first=0
    ).pairs


def _continued(lengths: Sequence[int], side: str, padded_len: int) -> Tensor:
    """A ragged batch after one more token of each item."""
    table = padded_positions(lengths, side=side, padded_len=padded_len)  # type: ignore[arg-type]
    return torch.cat([table, table.amax(1, keepdim=True) + 1], 1)


@pytest.mark.parametrize("side", ["left", "right"])
@pytest.mark.parametrize("mask", [masks.Window(WINDOW - 1, 0), masks.sliding_window(WINDOW)], ids=str)
def test_a_step_reads_the_window_of_each_item(mask: masks.Mask, side: str) -> None:
    table = _continued([8000, 5000, 2, 7000], side, 8191)
    assert _pairs(mask, table[:, -1:], table) <= 4 * 2 * WINDOW
    # All but the padding, where the mask hides no key before.
    assert _pairs(masks.Causal(), table[:, -1:], table) == 2 * int((table >= 0).sum())


@pytest.mark.parametrize("side", ["left", "right"])
def test_a_ragged_prefill_plans_bands(side: str) -> None:
    table = padded_positions(LENGTHS, side=side)  # type: ignore[arg-type]
    allowed = sum(min(WINDOW, i + 1) for length in LENGTHS for i in range(length))
    pairs = _pairs(masks.sliding_window(WINDOW), table, table)
    assert 2 * allowed <= pairs <= 2 * 4 * 2048 * (WINDOW + 192)
    assert _pairs(masks.Causal(), table, table) <= 2 * sum(length**2 for length in LENGTHS)


def test_causal_rows_without_padding_are_a_triangle() -> None:
    table = padded_positions(LENGTHS)
    rule = PositionedMask.of(masks.Causal(), *[Positions.of(table, "table")] * 2, CPU)
    plan = make(rule, (4, 2, 2048, 2048), q_first=0, kv_first=0)
    squares = [
        (tile.batch.start, strip.keys) for tile in plan.tiles for strip in tile.columns if strip.partial is not True
    ]
    assert squares == [(item, range(length)) for item, length in enumerate(LENGTHS)]


def test_a_document_of_each_item_is_found() -> None:
    mask = masks.Documents([[600] * 4, [300] * 8, [2400], [1] * 2400]) & masks.Causal()
    table = torch.stack([torch.arange(2400)] * 4)
    table = torch.cat([torch.full((4, 5), -1), table], 1)
    assert _pairs(mask, table[:, -1:], table) == 2 * (600 + 300 + 2400 + 1)


def test_unsorted_tables_are_looked_at_pair_by_pair() -> None:
    ring = torch.arange(4096).roll(7)[None].repeat(2, 1)
    step = torch.full((2, 1), 4096)
    assert _pairs(masks.Window(WINDOW, 0), step, ring) == 2 * 2 * 4096
    assert _pairs(masks.Window(WINDOW, 0), step, ring.sort(1).values) == 2 * 2 * WINDOW


def test_positions_far_apart_cost_no_more() -> None:
    """Masks may list a cut for every few positions; of those between two tokens there may be billions."""
    table = (torch.arange(2048) * 1_000_000_000)[None].repeat(2, 1)
    mask = masks.Causal() & (masks.Random(2, 64) | masks.Coarse(masks.Window(1, 1), 1_000_000_000))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("saccade.masks.Random.cuts", _unwanted)
        assert _pairs(mask, table, table) <= 2 * 2 * 2048**2
    far = table.clone()
    far[:, -1] = 1 << 61
    assert _pairs(masks.Window(3, 0), far, far) == 2 * 2 * 2048**2


def _unwanted(*_: object) -> None:
    raise AssertionError("asked for cuts")


def test_a_table_changed_later_changes_nothing() -> None:
    """The plan is made at once, the product later: both read the table as it was."""
    table = _continued([2000, 1500], "right", 2047)
    q, k = torch.randn(2, 2, 1, 8), torch.randn(2, 2, 2048, 8)
    step = table[:, -1:].clone()
    matrix = sc.AttentionMatrix(q, k, masks.Window(WINDOW, 0), q_positions=step, kv_positions=table)
    expected = matrix.to_dense().clone()
    step -= 300
    table.copy_(table.flip(1))
    assert torch.equal(matrix.to_dense(), expected)


@pytest.mark.parametrize("side", ["left", "right"])
def test_a_ragged_cache_reads_a_window(side: str) -> None:
    """Long enough to be planned as any other; each item is what it is alone."""
    lengths, softmax, mask = [2100, 40, 1300], Softmax(), masks.sliding_window(WINDOW)
    q, k, v = (torch.randn(3, 2, 2100, 8) for _ in range(3))
    more = [torch.randn(3, 2, 3, 8) for _ in range(3)]
    where = padded_positions(lengths, side=side)  # type: ignore[arg-type]
    cache = KVCache()
    outs = [cache.attend(softmax, q, k, v, mask=mask, positions=where)]
    outs += [cache.attend(softmax, *(x[:, :, i : i + 1] for x in more), mask=mask) for i in range(3)]
    for item, length in enumerate(lengths):
        own = slice(0, length) if side == "right" else slice(2100 - length, 2100)
        text = [
            torch.cat([x[item : item + 1, :, own], new[item : item + 1]], 2)
            for x, new in zip((q, k, v), more, strict=True)
        ]
        expected = softmax(*text[:2], mask=mask) @ text[2]
        got = torch.cat([outs[0][item : item + 1, :, own], *(x[item : item + 1] for x in outs[1:])], 2)
        torch.testing.assert_close(got, expected, atol=1e-5, rtol=1e-5)


def test_gradients_of_a_ragged_batch() -> None:
    table = padded_positions([1100, 700, 0])
    inputs = [torch.randn(3, 1, 1100, 4, requires_grad=True) for _ in range(3)]
    out = sc.attention(*inputs, masks.sliding_window(WINDOW), q_positions=table, kv_positions=table)
    place = table[:, :, None] - table[:, None, :]
    allowed = (place >= 0) & (place < WINDOW) & (table >= 0)[:, :, None] & (table >= 0)[:, None, :]
    expected = _attended(*inputs, allowed)
    grad = torch.randn_like(out)
    grads = torch.autograd.grad(out, inputs, grad)
    for own, other in zip(grads, torch.autograd.grad(expected, inputs, grad.double()), strict=True):
        torch.testing.assert_close(own, other.to(own.dtype), atol=2e-5, rtol=2e-5)


@settings(deadline=None)
@given(st.data())
def test_positions_that_ascend_advance_the_last_one_of_each_item(data: st.DataObject) -> None:
    after = data.draw(st.lists(st.integers(0, 3), min_size=1, max_size=3))
    row = st.lists(st.integers(-1, 6), min_size=(length := data.draw(st.integers(0, 4))), max_size=length)
    rows = data.draw(st.lists(row, min_size=len(after), max_size=len(after)))
    expected: list[int] | None = list(after)
    for item, positions in enumerate(rows):
        for position in positions:
            if expected is not None and 0 <= position < expected[item]:
                expected = None
            elif expected is not None and position >= 0:
                expected[item] = position + 1
    table = torch.tensor(rows, dtype=torch.int64).view(len(rows), length)
    last = Positions.ending_before(torch.tensor(after)).advanced(Positions.of(table, "test"), len(after), CPU)
    got = None if last is None else torch.as_tensor(last.after).expand(len(after)).tolist()
    assert got == expected


@pytest.mark.parametrize(
    "run, after", [(range(3, 6), 6), (range(5, 6), 6), (range(2, 4), None), (range(3, 9, 2), None)]
)
def test_a_run_advances_the_last_position_of_all_items(run: range, after: int | None) -> None:
    last = Positions.ending_before(3).advanced(Positions(run), 2, CPU)
    assert (None if last is None else last.after) == after


def test_no_tokens_advance_nothing() -> None:
    last = Positions.ending_before(3)
    assert last.advanced(Positions(range(0)), 2, CPU) is last
    assert last.following(2).run == range(3, 5)
