"""Weights that a model sets to 0 at masked pairs after the softmax, and NaN that it replaces."""

import math

import pytest
import torch
from tests.fusion.agreement import assert_agrees
from torch.nn import functional as F

from saccade.fusion import FuseAttention, ObserveAttention

N = 7
LOWEST = torch.finfo(torch.float32).min
CAUSAL = torch.ones(N, N, dtype=torch.bool).triu(1)
WITH_EMPTY_ROW = CAUSAL | (torch.arange(N) == 3)[:, None]


@pytest.fixture
def qkv():
    draw = torch.Generator().manual_seed(0)
    return [torch.randn(2, 3, N, 8, generator=draw).requires_grad_() for _ in range(3)]


def scores(qkv):
    return qkv[0] @ qkv[1].mT / 8**0.5


FUSED = {
    "filled twice": lambda s, hidden: s.masked_fill(hidden, LOWEST).softmax(-1).masked_fill(hidden, 0.0),
    "filled twice, -inf": lambda s, hidden: s.masked_fill(hidden, -math.inf).softmax(-1).masked_fill(hidden, 0.0),
    "filled in place": lambda s, hidden: s.masked_fill(hidden, -1e9).softmax(-1).clone().masked_fill_(hidden, 0.0),
    "after dropout": lambda s, hidden: F.dropout(s.masked_fill(hidden, -1e9).softmax(-1), 0.0).masked_fill(hidden, 0.0),
    "times a mask": lambda s, hidden: s.masked_fill(hidden, -1e9).softmax(-1) * (~hidden).float(),
    "times a bool mask": lambda s, hidden: s.masked_fill(hidden, -1e9).softmax(-1) * ~hidden,
    "a choice": lambda s, hidden: torch.where(hidden, 0.0, s.masked_fill(hidden, -1e9).softmax(-1)),
    "NaN of empty rows": lambda s, hidden: s.masked_fill(hidden, -math.inf).softmax(-1).nan_to_num(0.0),
}
CHANGED = {
    "a visible pair": lambda s: s.softmax(-1).masked_fill(CAUSAL, 0.0),
    "a visible pair in one row": lambda s: s.masked_fill(CAUSAL, -1e9).softmax(-1).masked_fill(WITH_EMPTY_ROW, 0.0),
    "another number": lambda s: s.masked_fill(CAUSAL, -1e9).softmax(-1).masked_fill(CAUSAL, 0.1),
    "times numbers": lambda s: s.masked_fill(CAUSAL, -1e9).softmax(-1) * (~CAUSAL * 0.5),
    "NaN times 0": lambda s: s.masked_fill(WITH_EMPTY_ROW, -math.inf).softmax(-1) * ~WITH_EMPTY_ROW,
    "NaN becomes a number": lambda s: s.masked_fill(WITH_EMPTY_ROW, -math.inf).softmax(-1).nan_to_num(0.5),
}


@pytest.mark.parametrize("hidden", [CAUSAL, WITH_EMPTY_ROW], ids=["causal", "an empty row"])
@pytest.mark.parametrize("weights", FUSED.values(), ids=FUSED)
def test_masked_pairs_that_are_set_to_0(qkv, weights, hidden):
    assert_agrees(lambda: weights(scores(qkv), hidden) @ qkv[2], qkv, calls=1)


@pytest.mark.parametrize("weights", FUSED.values(), ids=FUSED)
def test_the_recorded_row_is_empty(qkv, weights):
    calls, left_out = [], []
    with torch.no_grad(), ObserveAttention(calls.append, on_weights=left_out.append):
        w = weights(scores(qkv), WITH_EMPTY_ROW)
        w @ qkv[2]
    (call,) = calls
    assert not left_out
    torch.testing.assert_close(call.matrix().to_dense(), w)


@pytest.mark.parametrize("weights", CHANGED.values(), ids=CHANGED)
def test_other_changes_are_no_attention(qkv, weights):
    assert_agrees(lambda: weights(scores(qkv)) @ qkv[2], qkv, calls=0)


def test_scores_without_nan_before_a_mask_is_added(qkv):
    mask = torch.zeros(N, N).masked_fill(CAUSAL, -math.inf)
    assert_agrees(lambda: (torch.nan_to_num(scores(qkv)) + mask).softmax(-1) @ qkv[2], qkv, calls=1)


def test_minus_infinity_that_becomes_a_number(qkv):
    def attend(hidden):
        return scores(qkv).masked_fill(hidden, -math.inf).nan_to_num_().softmax(-1) @ qkv[2]

    assert_agrees(lambda: attend(CAUSAL), qkv, calls=1)
    assert_agrees(lambda: attend(WITH_EMPTY_ROW), qkv)  # the empty row attends to all keys


def test_nan_among_the_queries_is_replaced_by_the_model(qkv):
    with torch.no_grad():
        qkv[0][0, 0, 2] = math.nan
    expected = torch.nan_to_num(scores(qkv)).softmax(-1) @ qkv[2]
    with FuseAttention() as mode:
        mode._allow_non_finite = True
        out = torch.nan_to_num(scores(qkv)).softmax(-1) @ qkv[2]
    assert torch.equal(out, expected)


@pytest.mark.parametrize("shape", [(N, 8), (4, N, 8), (2, 4, N, 8)])
@pytest.mark.parametrize("softmax", [F.softmax, torch.nn.Softmax(), lambda s: F.softmin(-s)])
@pytest.mark.filterwarnings("ignore:Implicit dimension choice")
def test_a_softmax_without_a_dimension(shape, softmax):
    """Torch takes the first dimension of three; there, batch elements compete."""
    q, k, v = (torch.randn(shape, requires_grad=True) for _ in range(3))
    assert_agrees(lambda: softmax(q @ k.mT) @ v, (q, k, v), calls=int(len(shape) == 2))


@pytest.mark.filterwarnings("ignore:Implicit dimension choice")
def test_weights_of_a_softmax_without_a_dimension_are_reported():
    values, found = torch.randn(N, 8), []
    with ObserveAttention(lambda call: None, on_weights=found.append):
        weights = F.softmax(torch.randn(N, N).tanh())
        weights @ values
    assert torch.equal(found[0][0, 0], weights)


@pytest.mark.parametrize("options", [{}, {"tau": 1}, {"dim": 1}, {"hard": True}])
def test_weights_of_a_gumbel_softmax(options):
    found = []
    with ObserveAttention(lambda call: None, on_weights=found.append):
        weights = F.gumbel_softmax(torch.randn(2, N, N), *([1] if not options else []), **options)
        (weights.mT if "dim" in options else weights) @ torch.randn(2, N, 8)
    assert torch.equal(found[0][:, 0], weights.mT if "dim" in options else weights)


def test_the_name_of_a_type(qkv):
    def attend():
        s = scores(qkv)
        assert s.type() == "torch.FloatTensor"
        return (s / torch.tensor(2.0).type(s.type())).type("torch.FloatTensor").softmax(-1) @ qkv[2]

    assert_agrees(attend, qkv, calls=1)
    assert_agrees(lambda: scores(qkv).type("torch.DoubleTensor").softmax(-1) @ qkv[2].double(), qkv, calls=1)
