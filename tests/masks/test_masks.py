"""Every mask is what its definition says, alone and in any combination."""

import pickle

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.masks import brute_force
from tests.masks.random_masks import MAX_LEN, expressions

import saccade as sc
from saccade import masks
from saccade.plan import ALL, Groups, Triangle, make
from saccade.plan.key_ranges import Bounds, KeyDomain, Spans

ATOMS = [
    masks.Full(),
    masks.Causal(),
    masks.Window(2, 1),
    masks.Window(0, None),
    masks.Global([0, 4, 5]),
    masks.Global([3], sees=False),
    masks.Global([3], seen=False),
    masks.Strided(3),
    masks.Strided(2) | masks.Window(1, 0),
    masks.Causal() & (masks.Window(2, 0) | masks.Strided(3) | masks.Global([0])),
    masks.Documents([4, 5], rule=masks.Causal() & (masks.Strided(2) | masks.Window(1, 0))),
    masks.Strided(2) & masks.Strided(3),
    ~masks.Strided(2),
    masks.Segments(3, 2),
    masks.Segments(2, 5) | masks.Global([1]),
    masks.Documents([4, 5], rule=masks.Segments(2, 1)),
    masks.Prefix(4),
    masks.Causal() | masks.Prefix(3),
    masks.Random(2, 2, seed=5),
    masks.Causal() & (masks.Random(1, 3) | masks.Window(1, 1) | masks.Global([0])),
    masks.Blocks([[True, False, True], [False, True, False], [True, True, True]], 2),
    masks.Coarse(masks.Causal() & masks.Window(1, 0), 2),
    masks.PrefixPerDocument([4, 0, 5], [2, 0, 5]),
    masks.Documents([[3, 6], [9]], rule=masks.Causal()) | masks.PrefixPerDocument([[3, 6], [9]], [[0, 4], [2]]),
    masks.ImageBidirectional([-1, 0, 0, 0, 1, 1, -1, 5, 5]),
    masks.Causal() | masks.ImageBidirectional([[-1, 3, 3], [0, 1, -1]]),
    masks.Tree([-1, 0, 0, 1, 2, -1, 1, 5, 6]),
    masks.Causal() & (masks.Prefix(4) | masks.Tree([[-1, 0, 0, 1, 2], [-1, -1, 1, 2, 3]]).after(4)),
    masks.BlockDiffusion(2, 5),
    masks.BlockDiffusion(7, 3),
    masks.shared_prefix([3, 2, 4]),
    masks.shared_prefix([[1, 1, 2], [3, 2]]),
    masks.sliding_window(3),
    masks.longformer(1, [0, 5]),
    masks.bigbird(2, global_blocks=1, random_blocks=1),
    masks.streaming(2, 3),
    masks.sparse_transformer(3),
    masks.prefix_lm(4),
    masks.image_rows(2, 2, 4) & masks.Window(6, 0),
    masks.image_columns(3, 3, 2),
    masks.image_neighbors(1, 3, 3, (1, 0)),
    masks.Padding([3, 7]),
    masks.PerItem([masks.Causal(), masks.Window(2, 1) | masks.Global([0])]),
    masks.Padding([3, 0], side="left", padded_len=9),
    masks.Documents([2, 0, 4]),
    masks.Documents([[2, 4], [9]], rule=masks.Causal() & (masks.Window(1, 0) | masks.Global([0]))),
    masks.Predicate(lambda b, h, q, kv: (q + kv + b) % 3 == 0),
    masks.Dense(torch.eye(9, dtype=torch.bool)),
    masks.Causal() & ~masks.Window(1, 1),
]


@pytest.mark.parametrize("mask", ATOMS, ids=str)
@pytest.mark.parametrize("q_len, kv_len", [(9, 9), (4, 9), (9, 4), (1, 9), (9, 1)])
def test_to_dense_is_the_definition(mask: masks.Mask, q_len: int, kv_len: int) -> None:
    dense = mask.to_dense(q_len, kv_len, batch=2)
    assert torch.equal(dense[:, 0], brute_force.dense(mask, 2, q_len, kv_len))


@pytest.mark.parametrize("q, kv", [(range(5, 8), range(8)), (range(0, 6, 2), range(7, -1, -1)), (range(3), range(8))])
@pytest.mark.parametrize("mask", [masks.Causal(), masks.Window(2, 1) | masks.Global([0])], ids=str)
def test_to_dense_takes_positions_as_attention_does(mask: masks.Mask, q: range, kv: range) -> None:
    given = (torch.tensor(list(span)) for span in (q, kv))
    dense = mask.to_dense(3, 8, q_positions=q, kv_positions=kv)
    assert torch.equal(dense, mask.to_dense(3, 8, **dict(zip(("q_positions", "kv_positions"), given, strict=True))))
    query, key = torch.randn(1, 1, 3, 4), torch.randn(1, 1, 8, 4)
    weights = sc.AttentionMatrix(query, key, mask, q_positions=q, kv_positions=kv).to_dense()
    assert torch.equal(weights > 0, dense)
    with pytest.raises(ValueError, match=r"(Causal|Or)\.to_dense: q_positions must hold 2 positions; got 3"):
        mask.to_dense(2, 8, q_positions=q)
    with pytest.raises(ValueError, match=r"(Causal|Or)\.to_dense: kv_positions must start at 0 or later; got range"):
        mask.to_dense(3, 8, kv_positions=range(-1, 7))


@pytest.mark.parametrize("mask", ATOMS, ids=str)
@pytest.mark.parametrize("q_len, kv_len", [(9, 9), (4, 9), (0, 9)])
def test_density_is_the_share_of_allowed_pairs(mask: masks.Mask, q_len: int, kv_len: int) -> None:
    dense = mask.to_dense(q_len, kv_len, batch=2, heads=3)
    expected = dense.double().mean().item() if dense.numel() else 0.0
    assert mask.density(q_len, kv_len, batch=2, heads=3) == pytest.approx(expected, abs=1e-12)
    assert mask.count(q_len, kv_len, batch=2, heads=3) == int(dense.sum())


def test_density_counts_items_that_are_planned_apart() -> None:
    odd = masks.Predicate(lambda b, h, q, kv: (q + kv + b) % 3 == 0)
    mask = masks.PerItem([masks.Window(40, 0), masks.Causal(), masks.Window(700, 0)]) & odd
    assert {(tile.batch.start, tile.batch.stop) for tile in mask.plan(900).tiles} == {(0, 1), (1, 2), (2, 3)}
    expected = mask.to_dense(900, heads=2).double().mean().item()
    assert mask.density(900, heads=2) == pytest.approx(expected, abs=1e-12)


@pytest.mark.parametrize("q_len, kv_len", [(9, 9), (2, 9), (9, 2)])
def test_the_last_query_of_a_plan_stands_at_the_last_key(q_len: int, kv_len: int) -> None:
    plan = (masks.Causal() & masks.Window(1, 0)).plan(q_len, kv_len)
    held = {(row, key) for tile in plan.tiles for row in tile.rows for keys in tile.spans for key in keys}
    assert held >= {
        (row, row + kv_len - q_len - by) for row in range(q_len) for by in (0, 1) if row + kv_len - q_len >= by
    }


def test_a_layout_per_head() -> None:
    generator = torch.Generator().manual_seed(0)
    layout = torch.rand(3, 4, 4, generator=generator) < 0.4
    mask = masks.Causal() & masks.Blocks(layout, 2)
    dense = mask.to_dense(8)
    for head in range(3):
        alone = masks.Causal() & masks.Blocks(layout[head], 2)
        assert torch.equal(dense[:, head], alone.to_dense(8)[:, 0])
    assert torch.equal(_covered(mask, (2, 3, 8, 8)), dense.expand(2, 3, 8, 8))
    assert mask.density(8) == pytest.approx(dense.double().mean().item())


def test_random_blocks_are_drawn_once_and_for_all() -> None:
    mask = masks.Random(3, 4, seed=7)
    numpy_before, torch_before = np.random.get_state()[1].copy(), torch.get_rng_state()
    rows = np.arange(200)
    drawn = mask.drawn(rows)
    assert all(len(set(row)) == 3 for row in drawn.tolist())
    assert (drawn >= 0).all()
    assert (drawn < 2 * np.maximum(rows + 1, 3)[:, None]).all()
    short, long = mask.to_dense(40), mask.to_dense(120)
    assert torch.equal(short, long[..., :40, :40])
    assert torch.equal(mask.to_dense(4, 40)[..., 0, :], long[..., 36, :40])
    assert np.array_equal(np.random.get_state()[1], numpy_before)
    assert torch.equal(torch.get_rng_state(), torch_before)
    assert not torch.equal(masks.Random(3, 4, seed=8).to_dense(120), long)
    # Draws are even: over many rows, where in its range a block falls has the mean of a uniform draw.
    share = (masks.Random(1, 1, seed=1).drawn(np.arange(4000))[:, 0] + 0.5) / (2 * np.arange(1, 4001))
    assert abs(share.mean() - 0.5) < 4 / (12 * 4000) ** 0.5


def _covered(mask: masks.Mask, shape: tuple[int, int, int, int], whole_rows: bool = False) -> torch.Tensor:
    """Write a plan out; on the way, check that its promises about strips and residual keys hold."""
    batch, heads, q_len, kv_len = shape
    plan = make(mask, shape, q_first=kv_len - q_len, kv_first=0, whole_rows=whole_rows)
    assert not (whole_rows and plan.overlaps)
    got = torch.zeros(shape, dtype=torch.bool)
    rows_seen = torch.zeros(batch, heads, q_len, dtype=torch.int64)
    contents: dict[object, torch.Tensor] = {}
    for tile in plan.tiles:
        rows = tile.rows
        assert 0 <= rows[0] <= rows[-1] < q_len
        at = slice(rows.start, rows.stop, rows.step)
        rows_seen[tile.batch, tile.heads, at] += 1
        for strip in tile.columns:
            columns = slice(strip.keys.start, strip.keys.stop, strip.keys.step)
            part = tile.rule.to_dense(q_len, kv_len, batch=batch, heads=heads)[tile.batch, tile.heads, at, columns]
            assert not (got[tile.batch, tile.heads, at, columns] & part).any(), "a pair is in two tiles"
            got[tile.batch, tile.heads, at, columns] |= part
            if strip.partial is True:
                assert part.all()
            elif isinstance(strip.partial, Triangle):
                key = strip.partial
                triangle = torch.ones(key.rows, key.columns, dtype=torch.bool).tril(key.offset)
                assert torch.equal(part, triangle.expand_as(part))
            same = contents.setdefault(strip.partial, part)
            assert strip.partial is True or torch.equal(same, part)
    assert plan.overlaps or (rows_seen == 1).all()
    return got


@pytest.mark.parametrize("mask", ATOMS, ids=str)
@pytest.mark.parametrize("q_len, kv_len", [(9, 9), (4, 9), (9, 4), (1, 9), (9, 1)])
def test_a_plan_covers_what_is_allowed(mask: masks.Mask, q_len: int, kv_len: int) -> None:
    got = _covered(mask, (2, 2, q_len, kv_len))
    assert torch.equal(got, mask.to_dense(q_len, kv_len, batch=2, heads=2))


@settings(max_examples=50, deadline=None)
@given(data=st.data())
def test_random_expressions(data: st.DataObject) -> None:
    _check_random_expression(data)


@pytest.mark.slow
@settings(max_examples=10_000, deadline=None)
@given(data=st.data())
def test_many_random_expressions(data: st.DataObject) -> None:
    _check_random_expression(data)


def _check_random_expression(data: st.DataObject) -> None:
    batch = data.draw(st.sampled_from([1, 2, 3]), label="batch")
    mask = data.draw(expressions(batch), label="mask")
    q_len, kv_len = (data.draw(st.integers(1, MAX_LEN), label=name) for name in ("q_len", "kv_len"))
    blocks = data.draw(st.sampled_from([(768, 192, 48, 12, 1), (16, 7, 1), (5, 1), (1,)]), label="blocks")
    price = data.draw(st.sampled_from([0, 10, 30_000]), label="price of a tile")
    most = data.draw(st.sampled_from([1 << 22, 100, 1]), label="largest residual")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("saccade.plan.row_groups._ROW_BLOCKS", blocks)
        patch.setattr("saccade.plan.layout.TILE_COST", price)
        patch.setattr("saccade.plan.layout._MAX_RESIDUAL", most)
        got = _covered(mask, (batch, 1, q_len, kv_len))
    expected = brute_force.dense(mask, batch, q_len, kv_len)
    assert torch.equal(mask.to_dense(q_len, kv_len, batch=batch)[:, 0], expected)
    assert torch.equal(got[:, 0], expected)


@pytest.mark.parametrize("mask", [mask for mask in ATOMS if mask.is_value], ids=str)
def test_masks_are_values(mask: masks.Mask) -> None:
    assert mask == eval(repr(mask), {**vars(masks)})
    assert hash(mask) == hash(eval(repr(mask), {**vars(masks)}))
    assert mask.plan(9, batch=2) is mask.plan(9, batch=2)
    assert pickle.loads(pickle.dumps(mask)) == mask


def test_joining_flattens_and_refuses_what_cannot_fit() -> None:
    a, b, c = masks.Causal(), masks.Window(1, 1), masks.Global([0])
    assert (a & b & c).parts == (a, b, c)
    assert ~~a is a
    with pytest.raises(ValueError, match="have the same number of batch items"):
        masks.Padding([1, 2]) & masks.Padding([1, 2, 3])
    with pytest.raises(TypeError, match=r"Causal: & must join two masks; got Tensor\."):
        a & torch.ones(2, 2, dtype=torch.bool)


def test_a_list_of_masks_is_joined_like_a_tuple() -> None:
    parts = [masks.Causal(), masks.Prefix(2)]
    assert masks.And(parts) == masks.And(tuple(parts))
    assert masks.Or(parts) == masks.Or(tuple(parts))


def test_sizes_that_are_multiplied_stay_below_two_to_the_40() -> None:
    most = 1 << 40
    assert masks.Causal().after(most - 1).length == masks.Blocks([[True]], most - 1).block_size == most - 1
    with pytest.raises(ValueError, match=rf"Causal\.after: length must be below {most}; got {most}"):
        masks.Causal().after(most)
    with pytest.raises(ValueError, match=rf"Blocks: block_size must be below {most}; got {most}"):
        masks.Blocks([[True]], most)


def test_far_before_its_first_position_a_rule_allows_nothing() -> None:
    for rule in (masks.Blocks([[True, True], [False, True]], 2), masks.Dense(torch.ones(3, 3, dtype=torch.bool))):
        places = {"q_positions": range(40), "kv_positions": range(40)}
        assert not rule.after(40).to_dense(40, **places).any()


def test_large_plans_do_not_look_at_pairs() -> None:
    n = 1 << 20
    local = masks.Window(256, 256)
    for mask in (masks.Causal(), local, local | masks.Global([0, 77]), masks.Causal() & masks.Window(1024, 0)):
        plan = make(mask, (1, 1, n, n), q_first=0, kv_first=0)
        distinct = {strip.partial for tile in plan.tiles for strip in tile.columns}
        assert len(distinct) <= 12
        assert plan.pairs <= n * n if mask == masks.Causal() else plan.pairs < 3000 * n


def test_rules_of_items_tell_no_items_apart_themselves() -> None:
    heads = masks.Blocks(torch.rand(2, 3, 3) < 0.5, 3)
    both = masks.PerItem([heads, masks.Causal()]).to_dense(9)
    assert torch.equal(both, torch.cat([heads.to_dense(9), masks.Causal().to_dense(9, heads=2)]))
    with pytest.raises(ValueError, match="PerItem: rules must be masks of one batch item each"):
        masks.PerItem([masks.Causal(), masks.Padding([1, 2])])


def test_a_large_tensor_is_read_along_whatever_axes_are_asked_about() -> None:
    table = torch.rand(300, 300) < 0.5
    mask, index, zero = masks.Dense(table), torch.arange(300), torch.zeros(1, 1, 1, 1, dtype=torch.int64)
    along, across = index[None, None, :, None], index[None, None, None, :]
    assert torch.equal(mask.allows(zero, zero, along, across)[0, 0], table)
    assert torch.equal(mask.allows(zero, zero, across, along)[0, 0], table.T)
    assert torch.equal(mask.allows(zero, zero, index[:, None], index).expand(1, 1, 300, 300)[0, 0], table)
    assert torch.equal(mask.allows(zero, zero, along.flip(2), across)[0, 0], table.flip(0))


def test_zero_lengths() -> None:
    for q_len, kv_len in ((0, 5), (5, 0), (0, 0)):
        assert masks.Causal().to_dense(q_len, kv_len).shape == (1, 1, q_len, kv_len)
        assert len(masks.Causal().plan(q_len, kv_len)) == 0


def test_positions_replace_the_default_alignment() -> None:
    mask = masks.Causal() & (masks.Window(1, 0) | masks.Global([0]))
    q = torch.tensor([[3, 5, -1], [0, 1, 2]])
    kv = torch.tensor([[0, 2, 3, -1, 5], [-1, -1, 0, 1, 2]])
    dense = mask.to_dense(3, 5, batch=2, q_positions=q, kv_positions=kv)
    allows = brute_force.rule(mask)
    for b in range(2):
        for i, at in enumerate(q[b].tolist()):
            for j, key_at in enumerate(kv[b].tolist()):
                assert bool(dense[b, 0, i, j]) == (at >= 0 and key_at >= 0 and allows(b, at, key_at))


def test_key_padding_masks_are_inverted_once() -> None:
    is_padding = torch.tensor([[False, False, True], [False, True, True]])
    assert masks.from_key_padding_mask(is_padding) == masks.Padding([2, 1])
    assert masks.from_key_padding_mask(is_padding.flip(1)) == masks.Padding([2, 1], side="left", padded_len=3)
    scattered = torch.tensor([[False, True, False]])
    mask = masks.from_key_padding_mask(scattered)
    assert torch.equal(mask.to_dense(3)[0, 0, 0], ~scattered[0])


def test_a_predicate_may_tell_batch_items_and_heads_apart() -> None:
    mask = masks.Predicate(lambda b, h, q, kv: (b + h + q + kv) % 2 == 0)
    x = torch.randn(2, 4, 6, 8)
    expected = mask.to_dense(6, batch=2, heads=4)
    assert torch.equal(sc.AttentionMatrix(x, x, mask).to_dense() > 0, expected)
    assert expected[0, 0].ne(expected[1, 0]).any()


def test_batch_facts_apply_to_one_item_or_all() -> None:
    mask = masks.Padding([2, 4])
    assert mask.partial(sc.plan.Box(0, range(4), range(3))) is not True
    assert mask.partial(sc.plan.Box(1, range(4), range(3))) is True
    assert mask.partial(sc.plan.Box(ALL, range(4), range(2))) is True


@pytest.mark.parametrize("width", [2**62, 2**63 - 1, 10**19])
def test_a_window_wider_than_any_sequence_has_no_limit(width: int) -> None:
    assert masks.Window(width, 1) == masks.Window(None, 1)
    assert masks.Window(2, width) == masks.Window(2, None)


def test_a_mask_that_can_change_keeps_no_plan() -> None:
    class Below(masks.Mask):
        def __init__(self, limit: int) -> None:
            self.limit = limit

        def allows(self, b: torch.Tensor, h: torch.Tensor, q: torch.Tensor, kv: torch.Tensor) -> torch.Tensor:
            return (kv < self.limit).expand(torch.broadcast_shapes(q.shape, kv.shape))

        def bounds(self, groups: Groups, keys: KeyDomain) -> Bounds:
            return Bounds.exactly(Spans.within(keys, keys.first, self.limit))

    mask, x = Below(2), torch.randn(1, 1, 8, 4)
    assert not mask.is_value
    first = sc.attention(x, x, x, mask)
    mask.limit = 6
    torch.testing.assert_close(sc.attention(x, x, x, mask), sc.attention(x, x, x, masks.Prefix(6)))
    assert not torch.allclose(first, sc.attention(x, x, x, mask))


def test_many_scattered_global_tokens_plan_at_once() -> None:
    mask = masks.Window(4, 4) | masks.Global(range(0, 20_000, 100))
    plan = mask.plan(20_000)
    assert plan.pairs < 20_000**2
    small = masks.Window(2, 2) | masks.Global(range(0, 60, 7))
    assert torch.equal(_covered(small, (1, 1, 60, 60)), small.to_dense(60))
