"""Tests of the inputs of an attention: with replaced parts, in other dtypes, on other devices, and detached."""

from collections import namedtuple
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import saccade as sc
from saccade import masks, scores
from saccade.engine.dispatch import Request, attend_with_lse
from saccade.engine.inputs import AttentionInputs
from saccade.engine.to_device import moved
from saccade.plan import make

B, H, L, S, D = 2, 3, 4, 5, 6
META = torch.device("meta")
Pair = namedtuple("Pair", "first second")


def _made(dtype: torch.dtype = torch.float32, mask: object = None, **options: Any) -> AttentionInputs:
    query, key = torch.randn(B, H, L, D, dtype=dtype), torch.randn(B, H, S, D, dtype=dtype)
    return AttentionInputs.of(query, key, mask, **options)


def _additive() -> scores.Score:
    return scores.Additive(D, D, 4)


CHANGES: dict[str, dict[str, Any]] = {
    "a rule": {"rule": masks.Window(2, 0)},
    "a shape": {"shape": (1, H, L + 3, S)},
    "an origin": {"origin": (3, 1)},
    "all": {"rule": masks.Window(0, 2), "shape": (B, 1, 2, 2), "origin": (0, 1)},
}


@pytest.mark.parametrize("name", CHANGES)
def test_a_plan_is_that_of_rule_shape_and_origin(name: str) -> None:
    given = _made(mask=masks.Window(1, 1))
    assert given.plan.pairs  # made before anything changes
    made = given.replaced(**CHANGES[name])
    fresh = make(made.rule, made.shape, q_first=made.origin[0], kv_first=made.origin[1])
    assert list(made.plan.tiles) == list(fresh.tiles)
    assert list(made.plan.tiles) != list(given.plan.tiles)


def test_a_plan_is_made_once() -> None:
    given = _made(mask=lambda b, h, q, kv: kv <= q)  # of a function, of which no plan is kept elsewhere
    plan = given.plan
    assert given.plan is plan
    assert given.replaced(scale=2.0).plan is plan


def test_a_mask_is_read_when_inputs_are_made() -> None:
    given = _made(mask=torch.ones(L, S, dtype=torch.bool))
    now = given.current()
    assert (given.is_live, now.is_live) == (True, False)
    assert now.current() is now


@pytest.mark.parametrize("mask", [None, masks.Causal(), lambda b, h, q, kv: kv <= q], ids=["none", "rule", "function"])
def test_a_mask_that_reads_no_tensor_is_not_looked_at_again(mask: object) -> None:
    for options in ({}, {"q_positions": [1, 2, 4, 8], "kv_positions": [0, 1, 2, 4, 8]}):
        given = _made(mask=mask, **options)
        assert given.is_live is False
        assert given.current() is given


TRAINED = torch.ones(H, requires_grad=True)


def _changed(score: Tensor, b: Tensor, h: Tensor, q: Tensor, kv: Tensor) -> Tensor:
    return score * TRAINED[h]


@pytest.mark.parametrize("score", [None, _additive(), _changed], ids=["dot", "additive", "function"])
def test_without_its_sources_it_holds_none_of_their_memory(score: Any) -> None:
    given = _made(score=score, bias=torch.randn(H, L, S))
    value = torch.randn(B, H, S, D)
    empty = given.emptied()
    assert [x.numel() for x in (empty.query, empty.key, empty.bias.source)] == [0, 0, 0]
    assert empty.parameters == ()
    again, last = empty.of_sources(given.sources(value))
    assert last is value
    assert all(own is other for own, other in zip(again.leaves, given.leaves, strict=True))


SINGLE, DOUBLE, HALF, BRAIN = torch.float32, torch.float64, torch.float16, torch.bfloat16
MOVES = [  # score, dtype before, dtype asked for, dtype of the query after
    (None, SINGLE, BRAIN, BRAIN),
    (None, SINGLE, DOUBLE, DOUBLE),
    (None, DOUBLE, HALF, HALF),
    (None, BRAIN, None, BRAIN),
    (scores.Cosine(), BRAIN, None, SINGLE),
    (scores.Cosine(), BRAIN, HALF, SINGLE),
    (scores.Cosine(), BRAIN, DOUBLE, DOUBLE),
    (_additive(), SINGLE, BRAIN, SINGLE),
    (_additive(), SINGLE, DOUBLE, DOUBLE),
    (_additive(), BRAIN, None, SINGLE),
]


@pytest.mark.parametrize(("score", "before", "asked", "after"), MOVES)
def test_in_another_dtype_it_is_prepared_no_narrower(
    score: scores.Score | None, before: torch.dtype, asked: torch.dtype | None, after: torch.dtype
) -> None:
    given = _made(before, score=score, bias=torch.randn(H, L, S), sink_logit=torch.randn(H))
    own = given.to(None, asked)
    assert own.dtype == (before if asked is None else asked)
    assert (own.query.dtype, own.key.dtype) == (after, after)
    wide = DOUBLE if asked == DOUBLE else SINGLE
    assert {x.dtype for x in (own.bias.source, own.sink_logit, *own.parameters)} == {wide}
    torch.testing.assert_close(own.query.double(), given.query.double().to(after).double(), rtol=0, atol=0)
    assert len(own.parameters) == len(given.parameters)


def test_on_another_device_all_of_it_is() -> None:
    given = _made(mask=torch.ones(L, S, dtype=torch.bool), score=_additive(), bias=torch.randn(L, S))
    given = given.replaced(row_positions=torch.arange(L).flip(0), sink_logit=torch.zeros(H))
    own = given.to(META, None)
    places = (own.row_positions, *own.leaves, *own.rule.tensors())
    assert len(places) == 7
    assert {x.device for x in places} == {META}
    assert torch.equal(given.to(None, DOUBLE).row_positions, given.row_positions)


def test_parts_that_hold_tensors_are_moved() -> None:
    real, whole = torch.ones(2), torch.arange(2)
    held = Pair((real, [whole]), {"one": real, "none": None})
    (own, (other,)), table = made = moved(held, META, DOUBLE)
    assert type(made) is Pair
    assert {x.device for x in (own, other, table["one"])} == {META}
    assert [x.dtype for x in (own, other, table["one"])] == [DOUBLE, torch.int64, DOUBLE]
    assert list(table) == ["one", "none"]
    assert moved(real, None, BRAIN).dtype == SINGLE
    assert moved(real.double(), None, None).dtype == DOUBLE
    assert moved([SINGLE, torch.device("cpu")], META, BRAIN) == [BRAIN, META]
    assert moved([SINGLE, META], None, None) == [SINGLE, META]


class _Own:
    def __init__(self) -> None:
        self.tensor = torch.ones(2)


@pytest.mark.parametrize("kind", ["an object", "a module", "a module of saccade", "a class", "a number"])
def test_unknown_parts_stay_unchanged(kind: str) -> None:
    things = {
        "an object": _Own(),
        "a module": nn.Linear(2, 2),
        "a module of saccade": _additive(),
        "a class": masks.Causal,
        "a number": 2.5,
    }
    assert moved(things[kind], META, DOUBLE) is things[kind]


@pytest.mark.parametrize("dtype", [SINGLE, DOUBLE, BRAIN])
def test_shapes_and_dtypes_of_results_on_the_meta_device(dtype: torch.dtype) -> None:
    x = torch.empty(B, H, L, D, dtype=dtype, device=META)
    out, lse = sc.attention_with_lse(x, x, x[..., :2])
    assert (out.shape, out.dtype, out.device) == ((B, H, L, 2), dtype, META)
    assert (lse.shape, lse.dtype, lse.device) == ((B, H, L), DOUBLE if dtype == DOUBLE else SINGLE, META)


def test_a_product_drops_by_its_seed() -> None:
    given, value = _made(), torch.randn(B, H, S, D)
    outs = [attend_with_lse(given, value, Request(0.5, seed=seed))[0] for seed in (3, 3, 4)]
    assert torch.equal(outs[0], outs[1])
    assert not torch.equal(outs[0], outs[2])


def _share(lse: Tensor, sink: Tensor) -> Tensor:
    """Return the log share by definition, in float64."""
    return (lse.exp() / (lse.exp() + sink.exp()[None, :, None])).log()


def test_share_that_a_sink_leaves_to_the_keys() -> None:
    lse, sink = torch.randn(B, H, L, dtype=DOUBLE), torch.randn(H, dtype=DOUBLE)
    torch.testing.assert_close(sc.engine.bias.sink_logit.log_share(lse, sink), _share(lse, sink))
    lse[:, :, 1] = -torch.inf  # a row without keys: there is nothing to take from
    want = _share(lse, sink)
    want[:, :, 1] = 0.0
    torch.testing.assert_close(sc.engine.bias.sink_logit.log_share(lse, sink), want)


def test_overlapping_terms_still_give_complete_rows():
    x = torch.randn(1, 2, 40, 4)
    for mask, overlaps in ((masks.Strided(2) | masks.Window(3, 0), True), (masks.Causal(), False)):
        given = AttentionInputs.of(x, x, mask)
        assert given.plan.overlaps == overlaps
        assert (given.row_plan is given.plan) == (not overlaps)
        assert not given.row_plan.overlaps
        assert sorted(row for tile in given.row_plan.tiles for row in tile.rows) == list(range(40))
        held = {(row, key) for tile in given.row_plan.tiles for row in tile.rows for span in tile.spans for key in span}
        assert held >= {tuple(pair) for pair in mask.to_dense(40)[0, 0].nonzero().tolist()}


def test_plain_is_what_compares_by_dot_products_alone():
    x = torch.randn(1, 2, 5, 4)
    assert AttentionInputs.of(x, x, masks.Causal()).is_plain
    assert not AttentionInputs.of(x, x, None, score=scores.Cosine(), bias=torch.zeros(5, 5)).is_plain
    assert not AttentionInputs.of(x, x, None, bias=torch.zeros(5, 5)).is_plain
    assert not AttentionInputs.of(x, x, None, score=scores.Additive(4, 4, hidden_dim=2)).is_plain
    assert not AttentionInputs.of(x, x, None, score=lambda score, b, h, q, kv: score).is_plain
