"""Scores in a tile agree with the definition, forward and backward: caps, functions, large numbers, sinks."""

import math

import pytest
import torch

import saccade as sc
from saccade import masks, scores
from saccade.engine.kernels import tiled_cost as blocks
from saccade.scores.base import Prepared
from saccade.testing import oracle

ROUNDED = {torch.float64: 1e-7, torch.bfloat16: 4e-2}
CHANGES = {"none": None, "sigmoid": lambda s: 3 * s.sigmoid(), "written into": lambda s: s.mul_(0.5).exp_()}


@pytest.fixture
def small_blocks(monkeypatch):
    monkeypatch.setattr(blocks, "_ROWS", 5)
    monkeypatch.setattr(blocks, "_ENTRIES", 200)


def inputs(q_len=11, kv_len=13, dtype=torch.float64):
    sizes = [(2, 4, q_len, 8), (2, 2, kv_len, 8), (2, 2, kv_len, 6)]
    return [torch.randn(size, dtype=torch.float64).to(dtype).requires_grad_() for size in sizes]


def allowed_of(mask, q_len, kv_len):
    return mask.to_dense(q_len, kv_len, batch=2, heads=4)


class Alone(scores.Score):
    """A score that depends on the key alone, or on the query alone, by a function without gradients of its own."""

    def __init__(self, of_key):
        super().__init__()
        self.of_key = of_key

    def prepare(self, query, key):
        def compare(q, k):
            alone = k.sin().sum(-1)[..., None, :] if self.of_key else q.sin().sum(-1)[..., None]
            return alone.expand(*q.shape[:-1], k.shape[-2])

        return Prepared(query, key, compare)


@pytest.mark.parametrize("dtype", list(ROUNDED), ids=str)
@pytest.mark.parametrize("softcap", [None, 1.5])
@pytest.mark.parametrize("change", CHANGES)
@pytest.mark.usefixtures("small_blocks")
def test_gradients_of_capped_and_changed_scores(change, softcap, dtype):
    tensors, mask, modify = inputs(dtype=dtype), masks.Causal(), CHANGES[change]
    score = None if modify is None else lambda s, b, h, q, kv: modify(s)
    out = sc.attention(*tensors, mask, score=score, softcap=softcap, impl="tiled")
    modified = None if modify is None else lambda s: modify(s.clone())
    want, _ = oracle.attention(*tensors, allowed_of(mask, 11, 13), softcap=softcap, modify=modified)
    of = torch.randn_like(want)
    close = {"atol": ROUNDED[dtype], "rtol": ROUNDED[dtype]}
    torch.testing.assert_close(out.double(), want, **close)
    found, expected = (torch.autograd.grad(x, tensors, of.to(x.dtype)) for x in (out, want))
    for own, other in zip(found, expected, strict=True):
        torch.testing.assert_close(own.double(), other.double(), **close)


@pytest.mark.parametrize("of_key", [True, False])
@pytest.mark.usefixtures("small_blocks")
def test_a_score_s_own_function_may_leave_out_one_side(of_key):
    tensors = inputs()
    out = sc.attention(*tensors, masks.Causal(), score=Alone(of_key), impl="tiled")

    def compare(q, k):
        alone = k.sin().sum(-1)[..., None, :] if of_key else q.sin().sum(-1)[..., None]
        return alone.expand(*q.shape[:3], k.shape[2])

    want, _ = oracle.attention(*tensors, allowed_of(masks.Causal(), 11, 13), compare=compare, scale=1.0)
    torch.testing.assert_close(out, want)
    found = torch.autograd.grad(out.sin().sum(), tensors, materialize_grads=True, allow_unused=True)
    expected = torch.autograd.grad(want.sin().sum(), tensors, materialize_grads=True, allow_unused=True)
    torch.testing.assert_close(found, expected)


class Gaps(scores.Score):
    """A score of sines of summed differences, by a function with or without its own backward pass."""

    def __init__(self, has_rule, asked):
        super().__init__()
        self.has_rule, self.asked = has_rule, asked

    def prepare(self, query, key):
        def compare(q, k):
            return gaps(q, k).sin()

        def gradients(grad, q, k):
            self.asked.append(grad.shape)
            slope = grad * gaps(q, k).cos()
            return slope.sum(-1, keepdim=True).expand_as(q), -slope.sum(-2)[..., None].expand_as(k)

        if self.has_rule:
            compare.gradients = gradients
        return Prepared(query, key, compare)


def gaps(q, k):
    return q.sum(-1)[..., None] - k.sum(-1)[..., None, :]


@pytest.mark.parametrize("scale", [1.0, 0.25])
@pytest.mark.parametrize("has_rule", [True, False])
@pytest.mark.usefixtures("small_blocks")
def test_gradients_of_a_score_s_own_function(has_rule, scale):
    tensors, mask, asked = inputs(), masks.Causal(), []
    out = sc.attention(*tensors, mask, score=Gaps(has_rule, asked), scale=scale, impl="tiled")
    want, _ = oracle.attention(*tensors, allowed_of(mask, 11, 13), compare=lambda q, k: gaps(q, k).sin(), scale=scale)
    torch.testing.assert_close(out, want)
    torch.testing.assert_close(*(torch.autograd.grad(x.sin().sum(), tensors) for x in (out, want)))
    assert bool(asked) == has_rule


def test_parameters_of_a_score_beside_what_its_change_has_captured():
    tensors, slope = inputs(), torch.tensor(0.3, dtype=torch.float64, requires_grad=True)
    score = scores.Modified(lambda s, b, h, q, kv: s * slope, scores.Additive(8, 8, 3).double())
    leaves = [*tensors, slope, *score.parameters()]
    found = [
        torch.autograd.grad(sc.attention(*tensors, masks.Causal(), score=score, impl=impl).sin().sum(), leaves)
        for impl in ("tiled", "reference")
    ]
    torch.testing.assert_close(*found)


@pytest.mark.parametrize("impl", ["tiled", "reference"])
def test_a_bias_leaves_alone_what_a_function_has_made_of_scores(impl):
    tensors, bias = inputs(), torch.randn(11, 13, dtype=torch.float64)
    out = sc.attention(*tensors, masks.Causal(), score=lambda s, b, h, q, kv: s.exp_(), bias=bias, impl=impl)
    allowed = allowed_of(masks.Causal(), 11, 13)
    want, _ = oracle.attention(*tensors, allowed, bias=bias, modify=torch.exp)
    torch.testing.assert_close(out, want)
    torch.testing.assert_close(*(torch.autograd.grad(x.sin().sum(), tensors) for x in (out, want)))


@pytest.mark.parametrize("name", ["bias", "query", "key"])
def test_scores_too_large_to_be_exponentiated_as_they_are(name):
    query, key, value = (x.detach().float() for x in inputs())
    options = {"bias": torch.full((11, 13), 200.0)} if name == "bias" else {"scale": 1.0}
    query *= {"query": 300.0, "key": 0.1}.get(name, 1.0)
    key *= {"query": 0.1, "key": 300.0}.get(name, 1.0)
    want = oracle.attention(query, key, value, allowed_of(masks.Causal(), 11, 13), **options)
    got = sc.attention_with_lse(query, key, value, masks.Causal(), impl="tiled", **options)
    for own, other in zip(got, want, strict=True):
        torch.testing.assert_close(own.double(), other, atol=1e-3, rtol=1e-4)


def test_scores_too_large_that_many_small_numbers_make():
    """Scores overflow though each entry of queries and keys is small, since the width is large."""
    query, key, value = (x * torch.ones(1, 1, size, 256) for x, size in ((3.0, 2), (-3.0, 3), (1.0, 3)))
    key[..., 1, :] = 3.0
    want = oracle.attention(query, key, value, torch.ones(1, 1, 2, 3, dtype=torch.bool))
    got = sc.attention_with_lse(query, key, value, impl="tiled")
    for own, other in zip(got, want, strict=True):
        torch.testing.assert_close(own.double(), other, atol=1e-5, rtol=1e-5)


def test_rows_whose_lse_is_nothing_or_minus_infinity():
    """The lse is -inf for rows without keys, and 0 for a row with one key of score 0."""
    tensors, mask = inputs(11, 11), masks.Causal() & ~masks.Window(1, 0)
    with torch.no_grad():
        tensors[0][:, :, 2] = 0.0
    allowed = allowed_of(mask, 11, 11)
    found, expected = sc.attention_with_lse(*tensors, mask, impl="tiled"), oracle.attention(*tensors, allowed)
    assert (found[1][:, :, :2] == -math.inf).all()
    assert not found[1][:, :, 2].any()
    of = torch.randn_like(found[0])
    known = allowed.any(-1)
    gradients = [
        torch.autograd.grad((out * of).sum() + sum(lse[at].square().sum() for at in places), tensors)
        for (out, lse), places in ((found, (known, ~known)), (expected, (known,)))
    ]
    torch.testing.assert_close(*gradients)


def test_rounding_of_a_half_precision_output_is_not_in_its_gradients():
    """Gradients in bfloat16 are right for equal rows and values that differ by less than the rounding of their mean."""
    value = 8.0 + torch.arange(48).reshape(1, 1, 6, 8).mul(5).remainder(16) / 16
    sizes = ((1, 1, 600, 8), (1, 1, 6, 8))
    query, key = (torch.randn(1, 1, 1 if size[2] == 600 else 6, 8).expand(size) for size in sizes)
    own = [x.bfloat16().requires_grad_() for x in (query, key, value)]
    assert torch.equal(own[2].float(), value)
    wide = [x.detach().double().requires_grad_() for x in own]
    out, (want, _) = sc.attention(*own, impl="tiled"), oracle.attention(*wide, torch.ones(1, 1, 600, 6).bool())
    found = torch.autograd.grad(out.sum(), own)
    for part, exact in zip(found, torch.autograd.grad(want.sum(), wide), strict=True):
        torch.testing.assert_close(part.double(), exact, atol=1e-2, rtol=1e-2)


@pytest.mark.parametrize("impl", ["tiled", "reference"])
@pytest.mark.parametrize("kv_len", [0, 3])
def test_a_bias_with_empty_queries_or_keys(impl, kv_len):
    query, key = torch.randn(1, 2, 0 if kv_len else 4, 8), torch.randn(1, 2, kv_len, 8)
    bias = torch.randn(query.shape[2], kv_len)
    assert not sc.attention(query, key, key, bias=bias, impl=impl).any()


@pytest.mark.parametrize("impl", ["tiled", "reference"])
def test_functions_get_positions_of_tokens(impl):
    """Functions get token positions: aligned bottom-right, also before the first key; as given; 0 for no token."""
    told = []

    def function(s, b, h, q, kv):
        told.append((int(q.min()), int(q.max()), int(kv.min()), int(kv.max())))
        return s + 0.1 * q * (kv + 1) + 0.2 * b - 0.3 * h * kv

    def wanted(q, kv):
        b, h = torch.arange(2)[:, None, None, None], torch.arange(4)[None, :, None, None]
        return lambda s: s + 0.1 * q * (kv + 1) + 0.2 * b - 0.3 * h * kv

    tensors = [x.detach() for x in inputs(9, 6)]
    q, kv = torch.arange(-3, 6)[:, None], torch.arange(6)
    want, _ = oracle.attention(*tensors, torch.ones(2, 4, 9, 6, dtype=torch.bool), modify=wanted(q, kv))
    torch.testing.assert_close(sc.attention(*tensors, score=function, impl=impl), want)
    assert min(place[0] for place in told) == -3

    told.clear()
    places = {
        "q_positions": torch.tensor([-1, 0, 4, 2, 0, -1, 7, 1, 3]),
        "kv_positions": torch.tensor([0, 5, -1, 1, 3, 2]),
    }
    q, kv = places["q_positions"][:, None], places["kv_positions"]
    allowed = (kv >= 0) & (q >= 0)
    want, _ = oracle.attention(*tensors, allowed.expand(2, 4, 9, 6), modify=wanted(q, kv))
    out = sc.attention(*tensors, score=function, impl=impl, **places)
    torch.testing.assert_close(out, want)
    assert min(min(place) for place in told) == 0


@pytest.mark.parametrize(
    ("q_len", "place", "moved"), [(1, (12, 5), (0, 1)), (11, (6, 5), (0, 1)), (11, (6, 5), (1, 0))]
)
def test_an_answer_that_moves_by_a_row_or_a_column_is_another(q_len, place, moved):
    tensors, place = inputs(q_len, 13), list(place)
    out = sc.attention(*tensors, lambda b, h, q, kv: (kv == 0) | ((q == place[0]) & (kv == place[1])), impl="tiled")
    place[0] += moved[0]
    place[1] += moved[1]
    with pytest.raises(RuntimeError, match="must return the same result"):
        torch.autograd.grad(out.sum(), tensors)


@pytest.mark.usefixtures("small_blocks")
def test_a_function_that_answers_each_block_alike_is_no_error():
    tensors, mask = inputs(), masks.Predicate(lambda b, h, q, kv: (q + kv + h) % 3 != 0)
    out = sc.attention(*tensors, mask, impl="tiled")
    want, _ = oracle.attention(*tensors, allowed_of(mask, 11, 13))
    torch.testing.assert_close(*(torch.autograd.grad(x.sin().sum(), tensors) for x in (out, want)))


@pytest.mark.parametrize("softcap", [None, 1.5])
@pytest.mark.parametrize("has_sink", [False, True])
@pytest.mark.parametrize("is_recorded", [False, True])
def test_blocks_hold_weights_logs_and_lse_of_the_definition(is_recorded, has_sink, softcap):
    query, key, _ = (x.detach().requires_grad_(is_recorded) for x in inputs())
    sink = torch.tensor([0.5, -2.0, 1.0, 3.0], dtype=torch.float64) if has_sink else None
    mask = masks.Causal() & ~masks.Window(3, 0)  # the first rows see nothing
    allowed, unit = allowed_of(mask, 11, 13), torch.eye(13, dtype=torch.float64).expand(2, 2, 13, 13)
    want, want_lse = oracle.attention(query, key, unit, allowed, sink_logit=sink, softcap=softcap)
    assert not allowed.any(-1).all()
    weights, lse = torch.zeros_like(want), torch.zeros_like(want_lse)
    for block in sc.AttentionMatrix(query, key, mask, sink_logit=sink, softcap=softcap).blocks():
        rows = slice(block.rows.start, block.rows.stop)
        columns = [place for span in block.columns for place in span]
        part = torch.zeros_like(want[block.batch, block.heads, rows])
        part[..., columns] = block.weights
        weights[block.batch, block.heads, rows], lse[block.batch, block.heads, rows] = part, block.lse
        assert (block.log_weights is None) == is_recorded
        if block.log_weights is not None:
            torch.testing.assert_close(block.log_weights.exp(), block.weights)
            assert block.log_weights.isfinite().all()
    torch.testing.assert_close(weights, want)
    torch.testing.assert_close(lse, want_lse)
    if is_recorded:
        known = want_lse != -math.inf
        found, expected = (
            torch.autograd.grad(x.sin().sum() + y[known].sum(), (query, key))
            for x, y in ((weights, lse), (want, want_lse))
        )
        torch.testing.assert_close(found, expected)
