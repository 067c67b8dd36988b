"""NaN and infinity anywhere: what may not see them does not notice, forward and backward, in every kernel."""

import copy
import math
import random
from typing import Any, NamedTuple

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.engine.kernels.native_levels import NATIVE
from tests.masks.random_masks import anywhere, expressions
from torch import Tensor

import saccade as sc
from saccade import masks, positions, scores
from saccade.engine import dispatch
from saccade.engine.kernels.kernel import Request


class Result(NamedTuple):
    out: Tensor
    lse: Tensor
    weights: Tensor
    query: Tensor
    key: Tensor
    value: Tensor


def results(query: Tensor, key: Tensor, value: Tensor, rows: Tensor, impl: str, **options: Any) -> Result:
    """Return the results of one kernel; gradients are those of a random weighting of some rows."""
    leaves = [x.detach().clone().requires_grad_() for x in (query, key, value)]
    out, lse = sc.attention_with_lse(*leaves, impl=impl, **options)
    draw = torch.Generator().manual_seed(3)
    upstream = [torch.randn(x.shape, generator=draw, dtype=torch.float64).to(x.dtype) for x in (out, lse)]
    known = rows & (lse.detach() != -math.inf)
    total = (out[rows] * upstream[0][rows]).sum() + (lse[known] * upstream[1][known]).sum()
    gradients = torch.autograd.grad(total, leaves, allow_unused=True, materialize_grads=True)
    dense = sc.AttentionMatrix(query, key, **options).to_dense()
    return Result(out.detach(), lse.detach(), dense, *gradients)


# The kernels by name, each in the dtypes that it is tried in, and how far the same rows may then differ.
KERNELS = {kernel.name: kernel for kernel in dispatch.KERNELS}
TRIED = {
    "torch": [(name, torch.float64) for name in ("reference", "tiled", "fused", "matmul")],
    "native": [("native", torch.float32), ("native", torch.bfloat16)],
}
CLOSE = {torch.float64: (1e-8, 1e-9), torch.float32: (1e-4, 1e-5), torch.bfloat16: (2e-2, 2e-2)}


def in_dtype(given: dict[str, Any], dtype: torch.dtype) -> dict[str, Any]:
    """The same inputs and options in another dtype; positions, rules and masks as they are."""
    made = dict(given)
    for name, x in given.items():
        if isinstance(x, Tensor) and x.is_floating_point():
            made[name] = x.to(dtype)
        elif isinstance(x, scores.Score):
            made[name] = copy.deepcopy(x).to(dtype)
    return made


def kernels(given: dict[str, Any], kind: str) -> list[tuple[str, torch.dtype]]:
    """Return the kernels of a kind that run these inputs, with the dtypes in which they do."""
    found = []
    for name, dtype in TRIED[kind]:
        options = {key: x for key, x in in_dtype(given, dtype).items() if key != "value"}
        if not KERNELS[name].verdict(sc.AttentionMatrix(**options).inputs, Request(impl=name)).cannot:
            found.append((name, dtype))
    return found


class Drawn(NamedTuple):
    """Inputs, who may attend to whom, and a source of chance."""

    tensors: dict[str, Tensor]
    options: dict[str, Any]
    allowed: Tensor
    chance: random.Random

    @property
    def groups(self) -> int:
        return self.tensors["key"].shape[1]


def draw(data: st.DataObject) -> Drawn:
    batch = data.draw(st.sampled_from([1, 2]), label="batch")
    mask = anywhere(data.draw(expressions(batch), label="mask"))
    chance = random.Random(data.draw(st.integers(0, 10**6), label="seed"))
    torch.manual_seed(chance.randrange(10**6))
    heads = chance.choice([1, 2, 4])
    groups = chance.choice([count for count in (1, 2, 4) if heads % count == 0])
    q_len, kv_len, width = (chance.choice(sizes) for sizes in ([1, 3, 7, 20], [1, 4, 9, 30], [1, 4]))
    shapes = {
        "query": (batch, heads, q_len, width),
        "key": (batch, groups, kv_len, width),
        "value": (batch, groups, kv_len, chance.choice([1, 8])),
    }
    tensors = {name: torch.randn(shape, dtype=torch.float64) for name, shape in shapes.items()}
    places = {
        "q_positions": torch.randint(-1, 30, (batch, q_len)),
        "kv_positions": torch.randint(-1, 30, (batch, kv_len)),
    }
    places = places if chance.random() < 0.3 else {}
    allowed = mask.to_dense(q_len, kv_len, batch=batch, heads=heads, **places)
    options: dict[str, Any] = {"mask": mask, **places}
    if chance.random() < 0.4:
        options["bias"] = torch.randn(*(chance.choice([1, size]) for size in allowed.shape), dtype=torch.float64)
    elif q_len <= kv_len and chance.random() < 0.3:
        options["bias"] = positions.ALiBi(heads)
    if chance.random() < 0.3:
        options["sink_logit"] = torch.randn(heads, dtype=torch.float64)
    if chance.random() < 0.3:
        some = (scores.Gaussian(), scores.Cosine(), scores.Additive(width, width, 3).double())
        options["score"] = chance.choice(some)
    return Drawn(tensors, options, allowed, chance)


def in_query(drawn: Drawn, spoilt: float) -> Tensor:
    b, h, i, _ = places = [drawn.chance.randrange(size) for size in drawn.tensors["query"].shape]
    drawn.tensors["query"][tuple(places)] = spoilt
    touched = torch.zeros_like(drawn.allowed[..., 0])
    touched[b, h, i] = True
    return touched


def in_key_or_value(drawn: Drawn, spoilt: float) -> Tensor:
    name = drawn.chance.choice(["key", "value"])
    b, group, j, _ = places = [drawn.chance.randrange(size) for size in drawn.tensors[name].shape]
    drawn.tensors[name][tuple(places)] = spoilt
    touched = torch.zeros_like(drawn.allowed[..., 0]).unflatten(1, (drawn.groups, -1))
    touched[b, group] = drawn.allowed.unflatten(1, (drawn.groups, -1))[b, group, ..., j]
    return touched.flatten(1, 2)


def in_bias(drawn: Drawn, spoilt: float) -> Tensor:
    bias = drawn.options.get("bias")
    if not isinstance(bias, Tensor):
        return in_query(drawn, spoilt)
    hit = torch.zeros(bias.numel(), dtype=torch.bool)
    hit[drawn.chance.randrange(len(hit))] = True
    drawn.options["bias"] = bias.masked_fill(hit.view_as(bias), spoilt)
    return (hit.view_as(bias) & drawn.allowed).any(-1)


def in_sink(drawn: Drawn, spoilt: float) -> Tensor:
    """A spoilt sink may reach all that its group shares: there is no good answer, but for rows that see nothing."""
    drawn.options["sink_logit"] = torch.full(drawn.allowed.shape[1:2], math.nan, dtype=torch.float64)
    return torch.ones_like(drawn.allowed[..., 0])


def in_what_sees_nothing(drawn: Drawn, spoilt: float) -> Tensor:
    drawn.tensors["query"][~drawn.allowed.any(-1)] = spoilt
    return torch.zeros_like(drawn.allowed[..., 0])


def in_what_nobody_sees(drawn: Drawn, spoilt: float) -> Tensor:
    unseen = ~drawn.allowed.any(2).unflatten(1, (drawn.groups, -1)).any(2)
    drawn.tensors["key"][unseen] = drawn.tensors["value"][unseen] = spoilt
    return torch.zeros_like(drawn.allowed[..., 0])


def check(data: st.DataObject, kind: str) -> None:
    drawn = draw(data)
    clean = {name: x.clone() for name, x in drawn.tensors.items()} | drawn.options
    spoil = drawn.chance.choice(
        [in_query, in_key_or_value, in_bias, in_sink, in_what_sees_nothing, in_what_nobody_sees]
    )
    sees = drawn.allowed.any(-1)
    touched = spoil(drawn, drawn.chance.choice([math.nan, math.inf, -math.inf])) & sees
    dirty = drawn.tensors | drawn.options
    # Gradients of keys that a spoilt row sees are undefined; with a spoilt sink, those of all keys.
    keys = (spoil is not in_sink) & ~(touched[..., None] & drawn.allowed).any(2).unflatten(1, (drawn.groups, -1)).any(2)
    rows = ~touched
    shown = ("out", "lse", "weights", "query") if torch.isfinite(dirty["value"]).all() else ("out", "query")
    for impl, dtype in kernels(clean, kind):
        want, got = (results(rows=rows, impl=impl, **in_dtype(given, dtype)) for given in (clean, dirty))
        assert (got.out[~sees] == 0).all()
        assert got.lse[~sees].isneginf().all()
        rtol, atol = CLOSE[dtype]
        for names, places in ((shown, rows), (("key", "value"), keys)):
            for name in names:
                own, other = getattr(got, name)[places], getattr(want, name)[places]
                torch.testing.assert_close(
                    own, other, rtol=rtol, atol=atol, msg=lambda m, n=(spoil, impl, dtype, name): f"{n}: {m}"
                )


@pytest.mark.parametrize("kind", ["torch", NATIVE])
@settings(max_examples=20, deadline=None)
@given(data=st.data())
def test_rows_that_may_not_see_it_are_unchanged(kind: str, data: st.DataObject) -> None:
    check(data, kind)


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["torch", NATIVE])
@settings(max_examples=5_000, deadline=None)
@given(data=st.data())
def test_rows_that_may_not_see_it_are_unchanged_in_long_inputs(kind: str, data: st.DataObject) -> None:
    check(data, kind)


@pytest.mark.parametrize(
    "score", [scores.Gaussian(trainable=True), scores.Bilinear(4, 4), scores.Additive(4, 4, 3)], ids=repr
)
def test_hidden_rows_that_are_not_finite_move_no_parameter(score: scores.Score) -> None:
    q, k, v = (torch.randn(1, 2, 6, 4) for _ in range(3))
    places = torch.tensor([0, 1, 2, 3, -1, -1])
    q[:, :, 4:] = k[:, :, 4:] = v[:, :, 4:] = math.nan
    for impl in ("auto", "tiled", "reference"):
        for length in (6, 4):
            leaves = [x[:, :, :length].clone().requires_grad_() for x in (q, k, v)]
            where = {"q_positions": places[:length], "kv_positions": places[:length]}
            out = sc.attention(*leaves, masks.Causal(), score=score, impl=impl, **where)
            found = torch.autograd.grad(out.sin().sum(), [*leaves, *score.parameters()])
            if length == 6:
                padded = found
        for own, other in zip(padded, found, strict=True):
            torch.testing.assert_close(own[:, :, :4] if own.dim() == 4 else own, other)
        assert all((x[:, :, 4:] == 0).all() for x in padded[:3])


@pytest.mark.parametrize("impl", ["tiled", "reference", "auto"])
@pytest.mark.parametrize("spoilt", ["key", "value"])
def test_rows_that_see_nothing_of_it_drop_the_same_weights(impl: str, spoilt: str) -> None:
    clean = {name: torch.randn(2, 2, 9, 4, dtype=torch.float64) for name in ("query", "key", "value")}
    dirty = clean | {spoilt: clean[spoilt].index_fill(2, torch.tensor([5]), math.nan)}
    found = []
    for tensors in (clean, dirty):
        leaves = {name: x.clone().requires_grad_() for name, x in tensors.items()}
        matrix = sc.AttentionMatrix(leaves["query"], leaves["key"], masks.Causal(), impl=impl)
        out = matrix.matmul(leaves["value"], dropout_p=0.4, seed=3)
        gradients = torch.autograd.grad(out[:, :, :5].sin().sum(), list(leaves.values()))
        found.append((out[:, :, :5].detach(), *(x[:, :, :5] for x in gradients), out.detach()[:, :, 5:]))
    for want, got in zip(found[0][:4], found[1][:4], strict=True):
        torch.testing.assert_close(got, want)
    assert found[1][4].isnan().all()
    assert not torch.equal(found[0][0], sc.attention(*(x[:, :, :5] for x in clean.values()), masks.Causal()))


@pytest.mark.parametrize("wanted", [(0,), (1,), (2,), (0, 2)], ids=str)
@pytest.mark.parametrize("wrong", [math.nan, math.inf])
@pytest.mark.parametrize("which", ["key", "value"])
@pytest.mark.parametrize("impl", ["fused", "matmul", "tiled", NATIVE])
def test_some_gradients_alone_are_those_without_what_is_masked(impl, which, wrong, wanted):
    mask = masks.Window(20, 20) & masks.Padding([67])
    tensors = dict(zip(("query", "key", "value"), torch.randn(3, 1, 2, 70, 16).unbind(), strict=True))
    clean = {name: x.clone() for name, x in tensors.items()}
    tensors[which][:, :, 68] = wrong
    upstream = torch.randn(1, 2, 70, 16)
    grads = []
    for own in (tensors, clean):
        leaves = [x.requires_grad_(i in wanted) for i, x in enumerate(own.values())]
        out = sc.attention(*leaves, mask, impl=impl)
        grads.append(torch.autograd.grad(out, [leaves[i] for i in wanted], upstream))
    for got, expected in zip(*grads, strict=True):
        torch.testing.assert_close(got, expected)
