"""PaTH attention: the definition, one product of matrices for each pair; caches, packed texts, padding and memory."""

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

from saccade import masks, mechanisms
from saccade.caches import HeavyHitterCache, Int8Cache, KVCache
from saccade.engine.memory_accounting import counted
from saccade.mechanisms import PaTH
from saccade.mechanisms.forgetting import with_gates
from saccade.mechanisms.path import with_reflections
from saccade.support.errors import UnsupportedError

WIDTH = 6
CAUSAL = masks.Causal()
PACKED = masks.Documents([30, 50, 70], CAUSAL)


def draw(length: int, dtype: torch.dtype = torch.float64) -> tuple[Tensor, ...]:
    """Query, key, value, w and beta, with two key heads for four query heads."""
    torch.manual_seed(0)
    query = torch.randn(2, 4, length, WIDTH, dtype=dtype)
    key, value, w = torch.randn(3, 2, 2, length, WIDTH, dtype=dtype)
    return query, key, value, F.normalize(w, dim=-1), 2.0 * torch.rand(2, 2, length, dtype=dtype)


def definition(query: Tensor, key: Tensor, w: Tensor, beta: Tensor) -> Tensor:
    """Scores of all pairs with j at most i, one reflection at a time."""
    key, w, beta = (x.repeat_interleave(query.shape[1] // key.shape[1], 1) for x in (key, w, beta))
    rows, left = [], key[:, :, :0]
    for i in range(key.shape[2]):
        one = torch.eye(WIDTH, dtype=key.dtype) - beta[:, :, i, None, None] * w[:, :, i, :, None] * w[:, :, i, None]
        left = torch.cat([left @ one.mT, key[:, :, i, None]], 2)
        row = (left @ query[:, :, i, :, None])[..., 0] / WIDTH**0.5
        rows.append(F.pad(row, (0, key.shape[2] - i - 1), value=-torch.inf))
    return torch.stack(rows, 2)


@pytest.mark.parametrize("mask", [CAUSAL, masks.sliding_window(9), PACKED, CAUSAL & masks.Padding([150, 77])], ids=str)
def test_weights_products_and_gradients_are_those_of_the_definition(mask: masks.Mask) -> None:
    query, key, value, w, beta = leaves = [x.requires_grad_() for x in draw(150)]
    allowed = mask.to_dense(150)
    kept = allowed.any(-2).expand(2, 1, 150)  # keys that nobody sees reflect nothing
    scores = definition(query, key, w, beta * kept).masked_fill(~allowed, -torch.inf)
    A = PaTH(WIDTH)(query, with_reflections(key, w, beta), mask=mask)
    seen = ~scores.isinf().all(-1, keepdim=True)
    weights = torch.where(seen, scores, 0.0).softmax(-1) * seen
    torch.testing.assert_close(A.to_dense(), weights, atol=1e-12, rtol=1e-10)
    out, expected = A @ value, weights @ value.repeat_interleave(2, 1)
    torch.testing.assert_close(out, expected, atol=1e-12, rtol=1e-10)
    x = torch.randn_like(out)
    torch.testing.assert_close(A.mT @ x, weights.mT @ x, atol=1e-11, rtol=1e-10)
    own, theirs = (torch.autograd.grad(y, leaves, x) for y in (out, expected))
    torch.testing.assert_close(own, theirs, atol=1e-10, rtol=1e-9)


@pytest.mark.parametrize("length", [0, 1, 63, 64, 65, 128, 129])
def test_every_length(length: int) -> None:
    query, key, value, w, beta = draw(length)
    out = PaTH(WIDTH)(query, with_reflections(key, w, beta), mask=CAUSAL) @ value
    assert out.shape == (2, 4, length, WIDTH)
    if length:
        weights = definition(query, key, w, beta).softmax(-1)
        torch.testing.assert_close(out, weights @ value.repeat_interleave(2, 1), atol=1e-12, rtol=1e-10)


@pytest.mark.parametrize("split", [(1,) * 5 + (95,), (70, 1, 29), (0, 64, 36)], ids=str)
def test_a_cache_equals_the_whole_run_and_can_be_cropped_and_forked(split: tuple[int, ...]) -> None:
    query, key, value, w, beta = draw(100)
    rule, keys = PaTH(WIDTH), with_reflections(key, w, beta)
    cache, parts, start = KVCache(), [], 0
    for size in split:
        span = slice(start, start + size)
        given = [F.pad(query[:, :, span], (0, WIDTH + 1)), keys[:, :, span], value[:, :, span]]
        parts.append(cache.attend(rule, *given, mask=CAUSAL))
        start += size
    whole = rule(query, keys, mask=CAUSAL) @ value
    torch.testing.assert_close(torch.cat(parts, 2), whole, atol=1e-12, rtol=1e-10)
    fork = cache.fork()
    fork.crop(90)
    given = [F.pad(query[:, :, 90:], (0, WIDTH + 1)), keys[:, :, 90:], value[:, :, 90:]]
    torch.testing.assert_close(fork.attend(rule, *given, mask=CAUSAL), whole[:, :, 90:], atol=1e-12, rtol=1e-10)
    assert cache.length == 100


def test_caches_that_let_keys_go_are_refused_and_rounded_ones_are_close() -> None:
    query, key, value, w, beta = draw(40, torch.float32)
    keys = with_reflections(key, w, beta)
    with pytest.raises(UnsupportedError, match="does not provide all of them"):
        HeavyHitterCache(4).attend(PaTH(WIDTH), F.pad(query, (0, WIDTH + 1)), keys, value, mask=CAUSAL)
    rounded = Int8Cache().attend(PaTH(WIDTH), F.pad(query, (0, WIDTH + 1)), keys, value, mask=CAUSAL)
    torch.testing.assert_close(rounded, PaTH(WIDTH)(query, keys, mask=CAUSAL) @ value, atol=0.05, rtol=0)


def test_packed_texts_are_texts_alone_and_padding_reflects_nothing() -> None:
    query, key, value, w, beta = draw(150)
    keys = with_reflections(key, w, beta)
    packed = PaTH(WIDTH)(query, keys, mask=PACKED) @ value
    alone = PaTH(WIDTH)(query[:, :, 30:80], keys[:, :, 30:80], mask=CAUSAL) @ value[:, :, 30:80]
    torch.testing.assert_close(packed[:, :, 30:80], alone, atol=1e-12, rtol=1e-10)
    kept = torch.arange(150) % 7 != 3
    places = torch.where(kept, kept.cumsum(0) - 1, -1)
    A = PaTH(WIDTH)(query, keys, mask=CAUSAL, q_positions=places, kv_positions=places)
    some = PaTH(WIDTH)(query[:, :, kept], keys[:, :, kept], mask=CAUSAL) @ value[:, :, kept]
    torch.testing.assert_close((A @ value)[:, :, kept], some, atol=1e-12, rtol=1e-10)
    assert not (A @ value)[:, :, ~kept].any()


def test_gates_are_those_of_forgetting() -> None:
    query, key, value, w, beta = draw(100)
    gates = torch.randn(2, 4, 100, dtype=torch.float64) + 2.0
    gates[:, :, 40] = -torch.inf
    leaves = [x.requires_grad_() for x in (query, key, value, w, beta, gates)]
    out = PaTH(WIDTH)(query, with_reflections(key, w, beta, gates), mask=CAUSAL) @ value
    sums = F.logsigmoid(gates).clamp(min=-1e4).cumsum(2)
    scores = definition(query, key, w, beta) + sums[..., None] - sums[:, :, None]
    expected = scores.softmax(-1) @ value.repeat_interleave(2, 1)
    torch.testing.assert_close(out, expected, atol=1e-12, rtol=1e-10)
    grad = torch.randn_like(out)
    own, theirs = (torch.autograd.grad(y, leaves, grad) for y in (out, expected))
    torch.testing.assert_close(own, theirs, atol=1e-10, rtol=1e-9)
    still = PaTH(WIDTH)(query, with_reflections(key, w, torch.zeros_like(beta), gates), mask=CAUSAL) @ value
    fading = mechanisms.Forgetting(WIDTH)(query, with_gates(key, gates), mask=CAUSAL) @ value
    torch.testing.assert_close(still, fading)


def test_strengths_of_zero_are_softmax() -> None:
    query, key, value, w, beta = draw(80)
    plain = mechanisms.Softmax()(query, key, mask=CAUSAL) @ value
    own = PaTH(WIDTH)(query, with_reflections(key, w, torch.zeros_like(beta)), mask=CAUSAL) @ value
    torch.testing.assert_close(own, plain)


def test_gates_and_reflections_of_padding_do_not_count() -> None:
    query, key, value, w, beta = draw(100)
    keys = with_reflections(key, w, beta, torch.randn(2, 4, 100, dtype=torch.float64))
    kept = torch.stack([torch.arange(100) % 7 != 3, torch.arange(100) % 5 != 1])
    places = torch.where(kept, kept.cumsum(1) - 1, -1)
    A = PaTH(WIDTH)(query, keys, mask=CAUSAL, q_positions=places, kv_positions=places)
    for item, own in enumerate(kept):
        some = [x[item : item + 1, :, own] for x in (query, keys, value)]
        alone = PaTH(WIDTH)(*some[:2], mask=CAUSAL)
        torch.testing.assert_close((A @ value)[item, :, own], (alone @ some[2])[0], atol=1e-12, rtol=1e-10)
        row = A[item, 3, int(own.nonzero()[60])]
        torch.testing.assert_close(row[own], alone[0, 3, 60], atol=1e-12, rtol=1e-10)


def test_sums_of_gates_are_not_rounded() -> None:
    query, key, value, w, beta = draw(600, torch.float32)
    gates = torch.randn(2, 4, 600) + 3.0
    gates[:, :, :300] -= 100.0  # after these, sums are large and their differences small
    keys = with_reflections(key, w, beta, gates)
    near = PaTH(WIDTH)(query, keys, mask=CAUSAL) @ value
    wide = PaTH(WIDTH)(query.double(), keys.double(), mask=CAUSAL) @ value.double()
    torch.testing.assert_close(near.double(), wide, atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("part", range(5))
def test_nan_is_seen_by_the_rows_that_see_its_token(part: int) -> None:
    query, key, value, w, beta = draw(100)
    gates = torch.randn(2, 2, 100, dtype=torch.float64).repeat_interleave(2, 1)
    given = {"query": query, "key": key, "w": w, "beta": beta, "gates": gates}

    def run() -> Tensor:
        keys = with_reflections(given["key"], given["w"], given["beta"], given["gates"])
        return PaTH(WIDTH)(given["query"], keys, mask=masks.sliding_window(20)) @ value

    clean, name = run(), list(given)[part]
    given[name] = given[name].clone()
    given[name][0, 2 if name == "gates" else 1, 50] = torch.nan
    touched = torch.zeros_like(clean, dtype=torch.bool)
    touched[(0, 1, 50) if part == 0 else (0, slice(2, 4), slice(50, 70))] = True
    assert run()[touched].isnan().all()
    torch.testing.assert_close(run()[~touched], clean[~touched])


def test_memory_of_a_training_step_is_linear() -> None:
    def step(length: int) -> float:
        query, key, value, w, beta = (x[:1, :1].float().requires_grad_() for x in draw(length))

        def run() -> None:
            (PaTH(WIDTH)(query, with_reflections(key, w, beta), mask=CAUSAL) @ value).sum().backward()

        return counted(run).most

    assert step(1024) < 2.5 * step(512)


@pytest.mark.parametrize(
    ("wrong", "rule"),
    [
        (lambda q, k: PaTH(WIDTH)(q, k, mask=CAUSAL), "key must have shape"),
        (lambda q, k: PaTH(WIDTH)(q[..., 1:], k, mask=CAUSAL), "query must have shape"),
        (lambda q, k: with_reflections(k, k[..., 1:], k[..., 0]), "w and beta must have shapes"),
        (lambda q, k: PaTH(WIDTH)(q, F.pad(k, (0, WIDTH + 1))), "is not causal"),
        (lambda q, k: PaTH(0), "head_dim must be"),
    ],
)
def test_wrong_inputs_are_refused(wrong, rule) -> None:  # type: ignore[no-untyped-def]
    query, key, *_ = draw(5)
    with pytest.raises((ValueError, UnsupportedError), match=rule):
        wrong(query, key)
