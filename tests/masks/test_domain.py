"""A mask made for a number of positions is refused elsewhere, where it would silently hide everything."""

import numpy as np
import pytest
import torch

import saccade as sc
from saccade import masks
from saccade.masks.mask import EVERYWHERE, Domain
from saccade.masks.rules.key_ranges import KeyRanges
from saccade.mechanisms import Linear
from saccade.testing import CASES, LARGE_CASES

SQUARE = torch.ones(3, 3, dtype=torch.bool)
FOR_FEW = [
    masks.Documents([2, 2]),
    masks.Documents([2, 2], rule=masks.Causal()),
    masks.Documents([[2, 2], [1, 1]]),
    masks.Dense(SQUARE),
    masks.Dense(torch.ones(1, 1, 1, 4, dtype=torch.bool)),
    masks.Blocks([[True, False], [True, True]], 2),
    masks.Coarse(masks.Dense(SQUARE[:2, :2]), 2),
    masks.Neighborhood(2, 2, 1),
    masks.Axial(2, 2),
    masks.ShiftedWindows(2, 2, 1),
    masks.Neighborhood(1, 3, 1).after(1),
    ~masks.Documents([2, 2]),
    masks.Causal() & masks.Documents([2, 2]),
    masks.Documents([4]) | masks.Blocks([[True]], 3),
]


@pytest.mark.parametrize("mask", FOR_FEW, ids=str)
def test_a_mask_for_fewer_tokens_is_refused(mask):
    x = torch.randn(2, 1, 6, 4)
    more = x[:, :, : mask.domain.keys.stop + 1]
    for refused in (
        lambda: sc.attention(more, more, more, mask),
        lambda: sc.attention(x, x, x, mask),
        lambda: sc.AttentionMatrix(x, x, mask),
        lambda: sc.attention(x, x, x, mask, q_positions=range(6), kv_positions=range(6)),
        lambda: sc.attention(x, x, x, mask, q_positions=torch.arange(6), kv_positions=torch.arange(6)),
        lambda: sc.nn.MultiHeadAttention(4, 1, mask=mask)(x[:, 0]),
    ):
        with pytest.raises(ValueError, match=r"mask must cover the positions of all (queries|keys), 0 to [345]; got "):
            refused()
    few = x[:, :, : mask.domain.keys.stop]
    assert sc.attention(few, few, few, mask).shape == few.shape


def test_rows_that_a_tensor_does_not_hold_are_named():
    x, last_two = torch.randn(1, 1, 6, 4), masks.Dense(torch.ones(2, 6, dtype=torch.bool))
    assert sc.attention(x[:, :, :2], x, x, last_two).shape == (1, 1, 2, 4)
    with pytest.raises(ValueError, match=r"positions of all queries, 2 to 5; got Dense.*which covers 4 to 5"):
        sc.attention(x[:, :, :4], x, x, last_two)
    with pytest.raises(ValueError, match=r"positions of all queries, 0 to 5; got Dense.*which covers 1 to 5"):
        sc.attention(x, x, x, masks.Dense(torch.ones(5, 6, dtype=torch.bool)))


def test_more_queries_than_keys_begin_before_the_first_position():
    x = torch.randn(1, 1, 6, 4)
    few = x[:, :, :4]
    out = sc.attention(x, few, few, masks.Documents([2, 2]))
    torch.testing.assert_close(out[:, :, 2:], sc.attention(x[:, :, 2:], few, few, masks.Documents([2, 2])))
    assert not out[:, :, :2].any()


def test_queries_are_looked_at_where_no_key_is_a_token():
    x, nowhere = torch.randn(1, 1, 4, 4), torch.full((4,), -1)
    with pytest.raises(ValueError, match="positions of all queries, 2 to 5; got Documents"):
        sc.attention(x, x, x, masks.Documents([2, 2]), q_positions=torch.arange(2, 6), kv_positions=nowhere)


def test_a_sum_over_keys_is_asked_for_no_more_documents_than_there_are():
    x = torch.randn(1, 1, 6, 4)
    with pytest.raises(ValueError, match="Linear: mask must cover the positions of all keys, 0 to 5; got Documents"):
        Linear()(x, x, mask=masks.Documents([2, 2]))


def test_tokens_that_no_rule_is_about_stand_nowhere():
    x = torch.randn(1, 1, 6, 4)
    places = torch.tensor([0, 1, 2, 3, -1, -1])
    out = sc.attention(x, x, x, masks.Documents([2, 2]), q_positions=places, kv_positions=places)
    want = sc.attention(x[:, :, :4], x[:, :, :4], x[:, :, :4], masks.Documents([2, 2]))
    torch.testing.assert_close(out[:, :, :4], want)
    assert (out[:, :, 4:] == 0).all()


def test_longer_masks_are_read_from_their_start():
    x = torch.randn(1, 1, 6, 4)
    few = sc.attention(x, x, x, masks.Causal() & masks.Documents([4, 4]))
    torch.testing.assert_close(few, sc.attention(x, x, x, masks.Causal() & masks.Documents([4, 2])))


def test_a_rule_in_documents_is_about_the_longest_of_them():
    x = torch.randn(1, 1, 8, 4)
    for lengths, last in (([3, 5], 5), ([5, 3], 2), ([[3, 3, 2], [2, 6]], 4)):
        with pytest.raises(
            ValueError, match=f"mask must cover the positions of all keys, 0 to 7.*, which covers 0 to {last}"
        ):
            sc.attention(
                x.expand(2, 1, 8, 4), *[x.expand(2, 1, 8, 4)] * 2, masks.Documents(lengths, rule=masks.Dense(SQUARE))
            )
    assert sc.attention(x, x, x, masks.Documents([3, 2, 3], rule=masks.Dense(SQUARE))).shape == x.shape


def test_a_rule_on_blocks_is_about_the_positions_in_them():
    last_row = masks.Coarse(masks.Dense(torch.ones(2, 3, dtype=torch.bool)), 4)
    assert last_row.domain == Domain(range(4, 12), range(12))
    assert masks.Coarse(masks.Dense(torch.ones(1, 3, dtype=torch.bool)), 2).domain == Domain(None, range(6))


def test_rules_on_blocks_and_grids_are_about_all_of_them():
    assert masks.Blocks([[True, False, True], [True, True, False]], 2).domain == Domain(range(4), range(6))
    assert masks.Neighborhood(2, 3, 1).domain == Domain(range(6), range(6))


@pytest.mark.parametrize(
    ("rows", "columns", "domain"),
    [
        (1, 1, EVERYWHERE),
        (1, 2, Domain(None, range(2))),
        (1, 7, Domain(None, range(7))),
        (2, 2, Domain(range(2), range(2))),
        (2, 7, Domain(range(5, 7), range(7))),
        (7, 7, Domain(range(7), range(7))),
    ],
)
def test_ranges_of_keys_are_about_their_rows_and_columns(rows, columns, domain):
    starts = np.zeros((2, rows, 1), dtype=np.int64)
    found = KeyRanges(starts, starts + columns, columns)
    assert found.domain == domain
    assert found.first_row == (0 if rows == 1 else columns - rows)
    allowed = found.to_dense(9, 9)
    assert torch.equal(
        allowed[0, 0],
        torch.tensor(
            [[(domain.rows is None or q in domain.rows) and kv < columns for kv in range(9)] for q in range(9)]
        ),
    )


def test_a_rule_that_begins_later_leaves_out_the_start_of_each_document():
    last_rows = masks.Dense(torch.ones(2, 3, dtype=torch.bool))
    assert masks.Documents([3], rule=last_rows).domain == Domain(range(0), range(3))
    assert masks.Documents([0, 3], rule=last_rows).domain == Domain(range(0), range(3))


def test_a_union_is_about_all_that_one_of_its_rules_is_about():
    assert (masks.Neighborhood(2, 2, 1) | masks.Global([4])).domain == EVERYWHERE
    assert (masks.Dense(SQUARE) | masks.Documents([2, 2])).domain == Domain(range(4), range(4))
    assert (masks.Dense(SQUARE[:2]) & masks.Documents([2, 2])).domain == Domain(range(1, 3), range(3))
    assert (masks.Documents([2, 2]) & masks.Dense(SQUARE[:2])).domain == Domain(range(1, 3), range(3))
    for joined in (masks.Dense(SQUARE) & masks.Causal(), masks.Causal() & masks.Dense(SQUARE)):
        assert joined.domain == Domain(range(3), range(3))
    assert masks.Dense(SQUARE).after(2).domain == Domain(range(5), range(5))
    longer = masks.Dense(torch.ones(2, 4, dtype=torch.bool))
    assert (masks.Dense(SQUARE[:2]) | longer).domain == (longer | masks.Dense(SQUARE[:2])).domain
    assert (masks.Dense(SQUARE[:2]) | longer).domain == Domain(range(1, 4), range(4))


@pytest.mark.parametrize("case", [case for case in (*CASES, *LARGE_CASES) if case.mask is not None], ids=str)
def test_outside_of_its_domain_a_mask_allows_nothing(case):
    """A mask that is about some positions only allows no pair at others."""
    mask = case.mask
    domain = mask.domain
    allowed = mask.to_dense(700, batch=None)
    if domain.keys is not None and "~" not in str(mask):
        assert not allowed[..., domain.keys.stop :].any()
    if domain.rows is not None and "~" not in str(mask):
        assert not allowed[..., domain.rows.stop :, :].any()


@pytest.mark.parametrize("shape", [(6, 1), (2, 6, 1), (2, 1, 6, 1)])
def test_a_tensor_with_one_column_is_wrapped_in_full_or_not_at_all(shape):
    x, column = torch.randn(2, 1, 6, 4), torch.rand(shape) < 0.5
    want = sc.attention(x, x, x, column)
    with pytest.raises(ValueError, match=r"got Dense.*covers 0 to 0\.\nHint: .*tensor\.expand\(\.\.\., 6\)"):
        sc.attention(x, x, x, masks.Dense(column))
    torch.testing.assert_close(sc.attention(x, x, x, masks.Dense(column.expand(*shape[:-1], 6))), want)


@pytest.mark.parametrize("mask", [torch.ones(2, 6, dtype=torch.bool), torch.ones(2, 6, dtype=torch.int64)])
def test_a_mask_of_keys_for_each_item_is_named(mask):
    x = torch.randn(2, 1, 6, 4)
    with pytest.raises((ValueError, TypeError), match=r"\[batch, kv_len\], pass mask(\.bool\(\))?\[:, None, None, :\]"):
        sc.attention(x, x, x, mask)
    assert sc.attention(x, x, x, mask.bool()[:, None, None, :]).shape == x.shape


def test_masks_are_not_taken_for_true_or_false():
    for taken in (
        lambda: masks.Causal() and masks.Padding([3]),
        lambda: masks.Causal() or masks.Padding([3]),
        lambda: not masks.Causal(),
        lambda: bool(masks.Causal() | masks.Prefix(2)),
    ):
        with pytest.raises(TypeError, match=r"not be used as true or false.*\nHint: combine masks with & .*\| .*~"):
            taken()


@pytest.mark.parametrize(
    "case", [case for case in CASES if case.mask is not None and not case.mask.calls_functions], ids=str
)
def test_an_answer_keeps_the_axes_that_the_rule_does_not_tell_apart(case):
    """Answers keep size 1 on axes where the rule is the same, so that no mask is written out for each item and head."""
    b, h = torch.arange(5)[:, None, None, None], torch.arange(3)[None, :, None, None]
    items, heads = case.mask.shape
    b, h = (b if items == 1 else b[:items]), (h if heads == 1 else torch.arange(heads)[None, :, None, None])
    q, kv = torch.arange(case.q_len)[:, None], torch.arange(case.kv_len)
    allowed = case.mask.allows(b, h, q, kv)
    sizes = (1,) * (4 - allowed.dim()) + tuple(allowed.shape)
    assert sizes[0] in {1, items}
    assert sizes[1] in {1, heads}
