"""Recurrences: chunked = token by token = definition, whatever the rule, the length and the way texts are packed."""

import re

import pytest
import torch
from tests.mechanisms.recurrence_definitions import RULES, dense
from tests.sampled import sampled
from torch.nn import functional as F

from saccade import masks, mechanisms, statistics
from saccade.caches import RecurrentCache
from saccade.caches.recurrent import Memory
from saccade.mechanisms.recurrences.recurrence_matrix import RecurrenceMatrix
from saccade.support.errors import UnsupportedError

BATCH, HEADS, WIDTH, VALUE = 2, 2, 4, 3
CAUSAL = masks.Causal()
PACKED = masks.Documents([[30, 41, 20], [50, 1, 40]], CAUSAL)
LINES = {
    "causal": (CAUSAL, None),
    "packed": (PACKED, None),
    "padded": (CAUSAL & masks.Padding([91, 60]), None),
    "padded on the left": (CAUSAL & masks.Padding([91, 60], side="left", padded_len=91), None),
    "holes": (CAUSAL, torch.where(torch.arange(91) % 7 == 3, -1, torch.arange(91) - (torch.arange(91) + 3) // 7)),
}


def inputs(length=91, key_heads=HEADS, seed=0):
    torch.manual_seed(seed)
    query = torch.randn(BATCH, HEADS, length, WIDTH, dtype=torch.float64)
    key = torch.randn(BATCH, key_heads, length, WIDTH, dtype=torch.float64)
    value = torch.randn(BATCH, key_heads, length, VALUE, dtype=torch.float64)
    return [x.requires_grad_() for x in (query, key, value)]


def defined(name, query, key, mask, positions):
    """The matrix by definition, of the mask's own words."""
    rule = RULES[name]
    length = key.shape[2]
    place = torch.arange(length) if positions is None else positions
    b, q, kv = torch.arange(BATCH)[:, None, None], place[:, None], place[None, :]
    allowed = mask.allows(b, torch.zeros_like(b), q[None], kv[None]) & (q >= 0) & (kv >= 0)
    many = query.shape[1] // key.shape[1]
    gates = {
        name: (x if x.dim() == 4 or name == "beta" else x[..., None]).repeat_interleave(many, 1)
        for name, x in rule.gates(key).items()
    }
    keys = rule.keys(key).repeat_interleave(many, 1)
    return rule.defined(query, keys, gates, allowed.expand(BATCH, length, length))


@pytest.mark.ci
@pytest.mark.parametrize(("name", "line"), sampled([pytest.param(name, line) for name in RULES for line in LINES], 3))
def test_products_and_gradients_are_those_of_the_definition(name, line):
    (mask, positions), (query, key, value) = LINES[line], inputs()
    matrix = RULES[name](query, key, mask=mask, q_positions=positions, kv_positions=positions)
    expected = defined(name, query, key, mask, positions)
    torch.testing.assert_close(matrix.to_dense(), expected, atol=1e-10, rtol=0)
    out, theirs = matrix @ value, expected @ value
    torch.testing.assert_close(out, theirs, atol=1e-10, rtol=0)
    x = torch.randn(BATCH, HEADS, 91, 2, dtype=torch.float64)
    torch.testing.assert_close(matrix.mT @ x, expected.mT @ x, atol=1e-10, rtol=0)
    grad = torch.randn_like(out)
    leaves = (query, key, value)
    for own, their in zip(*(torch.autograd.grad(y, leaves, grad) for y in (out, theirs)), strict=True):
        torch.testing.assert_close(own, their, atol=1e-9, rtol=1e-9)


@pytest.mark.parametrize("length", [0, 1, 2, 3, 31, 32, 33, 255, 256, 257])
@pytest.mark.parametrize("name", RULES)
def test_every_length(name, length):
    query, key, value = inputs(length)
    out = RULES[name](query, key, mask=CAUSAL) @ value
    assert out.shape == (BATCH, HEADS, length, VALUE)
    if length <= 33:
        torch.testing.assert_close(out, defined(name, query, key, CAUSAL, None) @ value, atol=1e-10, rtol=0)
    else:
        half = RULES[name](*(x[:, :, : length // 2] for x in (query, key)), mask=CAUSAL) @ value[:, :, : length // 2]
        torch.testing.assert_close(out[:, :, : length // 2], half, atol=1e-10, rtol=0)


SPLITS = [(91,), (1,) * 6 + (85,), (40, 1, 50), (0, 33, 2, 56), (70, 21)]


@pytest.mark.ci
@pytest.mark.parametrize("line", ["causal", "packed", "padded"])
@pytest.mark.parametrize("split", SPLITS, ids=str)
@pytest.mark.parametrize("name", RULES)
def test_a_state_goes_on_where_it_was_left(name, split, line):
    mask, (query, key, value) = LINES[line][0], inputs()
    rule = RULES[name]
    full, last = rule(query, key, mask=mask).advance(value, None)
    memory, parts, start = None, [], 0
    for size in split:
        span = slice(start, start + size)
        place = torch.arange(start, start + size) if size else range(0)
        own = (x[:, :, span] for x in (query, key))
        matrix = rule(*own, mask=mask, q_positions=place, kv_positions=place)
        out, memory = matrix.advance(value[:, :, span], memory)
        parts.append(out)
        start += size
    torch.testing.assert_close(torch.cat(parts, 2), full, atol=1e-10, rtol=0)
    torch.testing.assert_close(memory.state, last.state, atol=1e-10, rtol=0)
    grads = [torch.randn_like(full), torch.randn_like(last.state)]
    leaves = (query, key, value)
    own = torch.autograd.grad([torch.cat(parts, 2), memory.state], leaves, grads)
    for ours, theirs in zip(own, torch.autograd.grad([full, last.state], leaves, grads), strict=True):
        torch.testing.assert_close(ours, theirs, atol=1e-9, rtol=1e-9)


@pytest.mark.parametrize("name", RULES)
def test_gradients_reach_the_state_that_comes_in(name):
    query, key, value = inputs(40)
    rule, matrix = RULES[name], RULES[name](query, key, mask=CAUSAL)
    state = rule.begins(torch.randn(BATCH, HEADS, WIDTH, VALUE, dtype=torch.float64)).requires_grad_()
    out, after = matrix.advance(value, Memory(state))
    parts, memory = [], Memory(state)
    for i in range(40):
        step = rule(query[:, :, i : i + 1], key[:, :, i : i + 1], mask=CAUSAL)
        one, memory = step.advance(value[:, :, i : i + 1], memory)
        parts.append(one)
    torch.testing.assert_close(out, torch.cat(parts, 2), atol=1e-10, rtol=0)
    x, y = torch.randn_like(out), torch.randn_like(state)
    (own,) = torch.autograd.grad([out, after.state], state, [x, y])
    (their,) = torch.autograd.grad([torch.cat(parts, 2), memory.state], state, [x, y])
    torch.testing.assert_close(own, their, atol=1e-10, rtol=0)


@pytest.mark.parametrize("name", RULES)
@pytest.mark.parametrize("split", SPLITS, ids=str)
def test_a_cache_equals_the_full_run(name, split):
    query, key, value = (x.detach() for x in inputs())
    rule = RULES[name]
    cache, parts, start = rule.new_cache(), [], 0
    assert isinstance(cache, RecurrentCache)
    for size in split:
        span = slice(start, start + size)
        parts.append(cache.attend(rule, *(x[:, :, span] for x in (query, key, value)), mask=CAUSAL))
        start += size
    torch.testing.assert_close(torch.cat(parts, 2), rule(query, key, mask=CAUSAL) @ value, atol=1e-10, rtol=0)
    assert cache.length == 91
    state, fork = cache.nbytes, cache.fork()
    again = [c.attend(rule, query[:, :, :3], key[:, :, :3], value[:, :, :3], mask=CAUSAL) for c in (cache, fork)]
    torch.testing.assert_close(again[0], again[1])
    assert cache.nbytes == state  # constant, however long the text
    fork.reorder(torch.tensor([1, 1]))
    assert fork.length == 94


@pytest.mark.parametrize("name", RULES)
@pytest.mark.parametrize("bad", ["query", "key", "value"])
@pytest.mark.parametrize("at", [0, 40, 90])
def test_nan_is_seen_by_those_after_it_in_its_text_alone(name, bad, at):
    given = dict(zip(("query", "key", "value"), (x.detach() for x in inputs()), strict=True))
    clean = RULES[name](given["query"], given["key"], mask=PACKED) @ given["value"]
    given[bad] = given[bad].clone()
    given[bad][0, 1, at, 0] = torch.nan
    matrix = RULES[name](given["query"], given["key"], mask=PACKED)
    out, ends = matrix @ given["value"], [30, 71, 91]
    touched = torch.zeros_like(out, dtype=torch.bool)
    stop = at + 1 if bad == "query" else next(end for end in ends if end > at)
    touched[0, 1, at:stop] = True
    assert out[touched].isnan().all()
    torch.testing.assert_close(out[~touched], clean[~touched])
    again, memory = matrix.advance(given["value"], None)
    torch.testing.assert_close(again, out, equal_nan=True)
    assert memory.tainted[0, 1].item() == (bad != "query" and at >= 71)
    if bad != "value":
        torch.testing.assert_close(matrix.to_dense().isnan().any(-1), touched.any(-1))


def test_more_queries_than_keys_and_more_gates_than_keys():
    query, key, value = inputs(40, key_heads=1)
    out = RULES["gated delta"](query, key, mask=CAUSAL) @ value
    expected = defined("gated delta", query, key, CAUSAL, None) @ value
    torch.testing.assert_close(out, expected, atol=1e-10, rtol=0)
    beta, decay = torch.rand(BATCH, 4, 40, dtype=torch.float64), -torch.rand(BATCH, 4, 40, dtype=torch.float64)
    wide = torch.randn(BATCH, 4, 40, VALUE, dtype=torch.float64)
    key = F.normalize(torch.randn(BATCH, 2, 40, WIDTH, dtype=torch.float64), dim=-1)
    query = torch.randn(BATCH, 2, 40, WIDTH, dtype=torch.float64)
    matrix = mechanisms.Delta()(query, key, beta=beta, decay=decay, mask=CAUSAL)
    assert matrix.shape == (BATCH, 4, 40, 40)
    assert matrix.kv_heads == 4
    own = dense(
        query.repeat_interleave(2, 1),
        key.repeat_interleave(2, 1),
        {"beta": beta, "decay": decay[..., None]},
        scale=WIDTH**-0.5,
        is_delta=True,
    )
    torch.testing.assert_close(matrix @ wide, own @ wide, atol=1e-10, rtol=0)
    _, memory = matrix.advance(wide, None)
    assert memory.state.shape == (BATCH, 4, WIDTH, VALUE)


def test_effects_of_gates():
    query, key, value = (x.detach() for x in inputs())
    unit = F.normalize(key, dim=-1)
    nothing, one = torch.zeros(BATCH, HEADS, 91), torch.ones(BATCH, HEADS, 91)
    plain = mechanisms.GatedLinear()(query, key, mask=CAUSAL) @ value
    torch.testing.assert_close(mechanisms.GatedLinear()(query, key, decay=nothing, mask=CAUSAL) @ value, plain)
    assert not (mechanisms.Delta()(query, unit, beta=nothing, mask=CAUSAL) @ value).any()
    decay = -torch.rand(BATCH, HEADS, 91)
    by_channel = decay[..., None].expand(-1, -1, -1, WIDTH)
    for mechanism in (mechanisms.GatedLinear(), mechanisms.Delta()):
        own = mechanism(query, unit, decay=decay, beta=one, mask=CAUSAL) @ value
        torch.testing.assert_close(mechanism(query, unit, decay=by_channel, beta=one, mask=CAUSAL) @ value, own)
    orthonormal = torch.eye(WIDTH, dtype=torch.float64).expand(BATCH, HEADS, -1, -1)
    few = [x[:, :, :WIDTH] for x in (query, value)]
    torch.testing.assert_close(
        mechanisms.Delta()(few[0], orthonormal, mask=CAUSAL) @ few[1],
        mechanisms.GatedLinear()(few[0], orthonormal, mask=CAUSAL) @ few[1],
    )
    emptied = decay.clone()
    emptied[..., 50] = -torch.inf  # the state begins anew
    own = mechanisms.GatedLinear()(query, key, decay=emptied, mask=CAUSAL) @ value
    rest = [x[:, :, 50:] for x in (query, key, decay, value)]
    alone = mechanisms.GatedLinear()(rest[0], rest[1], decay=rest[2], mask=CAUSAL) @ rest[3]
    torch.testing.assert_close(own[:, :, 50:], alone)


def test_constant_decays_are_those_of_their_papers():
    retnet = mechanisms.GatedLinear.retnet(4)
    torch.testing.assert_close(retnet.decay.exp(), 1 - 2.0 ** -torch.arange(5.0, 9.0, dtype=torch.float64))
    x = torch.ones(1, 4, 5, 1)
    expected = retnet.decay.float().exp()[:, None] ** torch.arange(4.0, -1.0, -1.0)
    torch.testing.assert_close(retnet(x, x, mask=CAUSAL)[0, :, 4], expected)
    lightning = mechanisms.GatedLinear.lightning(8)
    torch.testing.assert_close(lightning.decay[0].item(), -0.5 * (1 + 1e-5), atol=1e-6, rtol=0)
    ssd = mechanisms.SSD(2)
    torch.testing.assert_close(ssd.log_rate.exp(), torch.tensor([1.0, 2.0]))
    step = torch.rand(1, 2, 6)
    one = torch.ones(1, 1, 6, 1)
    matrix = ssd(one, one, step=step, mask=CAUSAL)[0, 1, 5]
    sums = step[0, 1].flip(0).cumsum(0).flip(0) - step[0, 1]
    torch.testing.assert_close(matrix, step[0, 1] * (-2.0 * sums).exp())


def test_float32_is_close_and_narrow_inputs_are_computed_in_it():
    query, key, value = (x.detach() for x in inputs(300))
    for name, rule in RULES.items():
        wide = rule(query, key, mask=CAUSAL) @ value
        near = rule(query.float(), key.float(), mask=CAUSAL) @ value.float()
        torch.testing.assert_close(near.double(), wide, atol=2e-5, rtol=1e-4, msg=name)
        half = rule(query.bfloat16(), key.bfloat16(), mask=CAUSAL)
        assert (half @ value.bfloat16()).dtype == torch.bfloat16
        _, memory = half.advance(value.bfloat16(), None)
        assert memory.state.dtype == torch.float32


def test_statistics_of_signed_rows():
    query, key, value = (x.detach() for x in inputs())
    matrix = RULES["gated delta"](query, key, mask=CAUSAL)
    dense = matrix.to_dense()
    torch.testing.assert_close(matrix.received(), dense.sum(2))
    torch.testing.assert_close(matrix.topk(3).weights, dense.topk(3).values)
    torch.testing.assert_close(matrix[1, 0, 17], dense[1, 0, 17])
    torch.testing.assert_close(matrix.pooled(91), dense)
    assert not matrix.is_stochastic
    with pytest.raises(UnsupportedError, match="do not sum to 1"):
        matrix.entropy()
    mean = (matrix - 0.5 * matrix) @ value
    torch.testing.assert_close(mean, 0.5 * (dense @ value))
    assert isinstance(matrix.to(torch.float32), RecurrenceMatrix)
    torch.testing.assert_close(matrix.to(torch.float32).to_dense(), dense.float())


REFUSED = {
    "not causal": (mechanisms.Delta(), "is not causal"),
    "window": (lambda q, k: mechanisms.Delta()(q, k, mask=masks.Window(3, 0)), "so queries cannot choose"),
    "order": (
        lambda q, k: mechanisms.Delta()(
            q, k, mask=CAUSAL, q_positions=torch.arange(90, -1, -1), kv_positions=torch.arange(90, -1, -1)
        ),
        "a state depends on the order of its tokens",
    ),
    "growth": (lambda q, k: mechanisms.Delta()(q, k, decay=torch.ones(2, 2, 91), mask=CAUSAL), "decay must be at most"),
    "shape": (
        lambda q, k: mechanisms.Delta()(q, k, beta=torch.ones(2, 91), mask=CAUSAL),
        "beta must be a float tensor",
    ),
    "kind": (lambda q, k: mechanisms.Delta()(q, k, beta=1.0, mask=CAUSAL), "beta must be a tensor"),
    "heads": (
        lambda q, k: mechanisms.Delta()(q, k, beta=torch.ones(2, 3, 91), mask=CAUSAL),
        "be multiples of one another",
    ),
    "ints": (
        lambda q, k: mechanisms.Delta()(q, k, beta=torch.ones(2, 2, 91, dtype=torch.int64), mask=CAUSAL),
        "beta must be a float tensor",
    ),
    "constant": (lambda q, k: mechanisms.GatedLinear(torch.ones(2)), "float tensor [heads] with values of at most 0"),
    "steps": (lambda q, k: mechanisms.SSD(2)(q, k, step=-torch.ones(2, 2, 91), mask=CAUSAL), "step must be at least 0"),
    "number of steps": (lambda q, k: mechanisms.SSD(2)(q, k, step=torch.ones(2, 2), mask=CAUSAL), "step must have"),
    "another rule": (
        lambda q, k: mechanisms.Delta()(q, k, mask=CAUSAL).advance(q, Memory(torch.zeros(2, 2, 9, 4))),
        "features must be those of the memory",
    ),
}


@pytest.mark.parametrize("name", REFUSED)
def test_inputs_without_such_a_matrix_are_refused(name):

    query, key, _ = inputs()
    wrong, words = REFUSED[name]
    with pytest.raises((TypeError, ValueError, UnsupportedError), match=re.escape(words)):
        wrong(query.detach(), key.detach())


def test_received_needs_one_sweep_and_other_questions_are_answered_beside_it():
    query, key, _ = (x.detach() for x in inputs())
    matrix = RULES["kda"](query, key, mask=PACKED)
    received, strongest = matrix.compute(statistics.Received(), statistics.TopK(2))
    torch.testing.assert_close(received, matrix.to_dense().sum(2))
    assert strongest.weights.shape == (BATCH, HEADS, 91, 2)


@pytest.mark.parametrize("bad", [torch.inf, -torch.inf], ids=str)
@pytest.mark.parametrize("which", ["query", "key", "gate"])
@pytest.mark.parametrize("name", RULES)
def test_infinity_spreads_as_nan_does(name, which, bad):
    query, key, value = (x.detach() for x in inputs(length=20))
    gates = RULES[name].gates(key)
    if which == "gate":
        which = next((one for one in ("erase", "angle") if one in gates), "beta")
        gates.setdefault(which, torch.ones_like(key[..., 0]))

    def run(number):
        tensors = {"query": query, "key": RULES[name].keys(key), **gates}
        tensors[which] = tensors[which].clone()
        tensors[which][0, 1, 7] = number
        return RULES[name].inner(tensors.pop("query"), tensors.pop("key"), mask=CAUSAL, **tensors) @ value

    expected = run(torch.nan)
    assert expected[0, 1, 7].isnan().all()
    torch.testing.assert_close(run(bad), expected, equal_nan=True)
