"""The compiled kernel on random masks, shapes and terms, forward and backward, against the definition."""

import math
from typing import Any

import pytest
import torch
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from tests.engine.kernels.native_levels import needs_native
from tests.masks.random_masks import anywhere, expressions
from torch import Tensor

import saccade as sc
from saccade import masks, positions
from saccade.engine import dropout
from saccade.testing import oracle
from saccade.testing.tolerances import error, tolerance

DTYPES = [torch.float32, torch.bfloat16]
SEED = 11
SEVERAL = 4  # times what the laws allow: here gradients of hundreds of rows, each a small difference, meet in one key


def defined(tensors: list[Tensor], allowed: Tensor, dropout_p: float, **options: Any) -> tuple[Tensor, Tensor]:
    """Compute the product from the weights, which the definition gives for unit vectors as values."""
    query, key, value = tensors
    (batch, heads, q_len, _), kv_len = query.shape, key.shape[2]
    units = torch.eye(kv_len, dtype=torch.float64).expand(batch, key.shape[1], -1, -1)
    weights, lse = oracle.attention(query, key, units, allowed, **options)
    if dropout_p:
        places = [torch.arange(size) for size in (batch, heads, q_len, kv_len)]
        places[2] += kv_len - q_len
        along = [at.view([-1 if axis == own else 1 for axis in range(4)]) for own, at in enumerate(places)]
        weights = weights * dropout.keep(SEED, *along, dropout_p) / (1.0 - dropout_p)
    return weights @ value.double().repeat_interleave(heads // key.shape[1], 1), lse


def check(dtype: torch.dtype, data: st.DataObject) -> None:
    batch = data.draw(st.sampled_from([1, 2]), label="batch")
    wide = data.draw(st.sampled_from([1, 9]), label="tokens for each position")
    mask = anywhere(data.draw(expressions(batch), label="mask"))
    mask = mask if wide == 1 else masks.Coarse(mask, wide)
    assume(not mask.calls_functions)
    heads, groups = data.draw(st.sampled_from([(1, 1), (4, 4), (4, 2), (6, 1)]), label="heads")
    q_len, kv_len = (wide * data.draw(st.integers(1, 40), label="length") for _ in range(2))
    width, value_width = (data.draw(st.sampled_from([1, 8, 16, 33, 64]), label="width") for _ in range(2))
    names = data.draw(st.sets(st.sampled_from(["scale", "softcap", "bias", "dropout"])), label="options")
    torch.manual_seed(data.draw(st.integers(0, 99), label="seed"))
    shapes = [(batch, heads, q_len, width), (batch, groups, kv_len, width), (batch, groups, kv_len, value_width)]
    tensors = [torch.randn(shape).to(dtype).requires_grad_() for shape in shapes]
    allowed = mask.to_dense(q_len, kv_len, batch=batch, heads=heads)
    ours, theirs = ({"scale": 0.3} if "scale" in names else {}) | ({"softcap": 2.0} if "softcap" in names else {}), {}
    theirs |= ours
    if "bias" in names:
        kind = data.draw(st.sampled_from(["whole", "keys", "distances"]), label="bias")
        if kind == "distances" and q_len <= kv_len:
            ours["bias"] = positions.ALiBi(heads)
            apart = torch.arange(kv_len - q_len, kv_len)[:, None] - torch.arange(kv_len)
            table = positions.ALiBi(heads).values(apart.flatten(), tensors[0], 1.0)
            theirs["bias"] = table[0, :, 0].unflatten(-1, apart.shape)
        else:
            sizes = (batch, heads, q_len, kv_len) if kind == "whole" else (1, heads, 1, kv_len)
            ours["bias"] = theirs["bias"] = torch.randn(sizes).to(dtype).requires_grad_()
            tensors.append(ours["bias"])
    dropout_p = 0.3 if "dropout" in names else 0.0
    matrix = sc.AttentionMatrix(tensors[0], tensors[1], mask, impl="native", **ours)
    out = matrix.matmul(tensors[2], dropout_p=dropout_p, seed=SEED if dropout_p else None)
    compare((out, matrix.lse), defined(tensors[:3], allowed, dropout_p, **theirs), tensors, dtype)


def compare(
    ours: tuple[Tensor, Tensor], theirs: tuple[Tensor, Tensor], leaves: list[Tensor], dtype: torch.dtype
) -> None:
    (out, lse), (expected, expected_lse) = ours, theirs
    assert error(out, expected) <= tolerance(dtype, "output")
    assert error(lse, expected_lse) <= tolerance(dtype, "lse")
    rows = expected_lse > -math.inf
    weights = (out.shape[3] ** -0.5 * torch.randn(out.shape)).to(dtype)
    found, wanted = (
        torch.autograd.grad((x * weights.to(x.dtype)).sum() + 0.1 * y[rows].sum(), leaves, allow_unused=True)
        for x, y in (ours, theirs)
    )
    for name, own, other in zip(("query", "key", "value", "bias"), found, wanted, strict=False):
        assert error(own, other) <= SEVERAL * tolerance(dtype, "gradient"), name


@needs_native
@pytest.mark.parametrize("dtype", DTYPES)
@settings(max_examples=25, deadline=None)
@given(data=st.data())
def test_random_masks(dtype: torch.dtype, data: st.DataObject) -> None:
    check(dtype, data)


@pytest.mark.slow
@needs_native
@pytest.mark.parametrize("dtype", DTYPES)
@settings(max_examples=3_000, deadline=None)
@given(data=st.data())
def test_many_random_masks(dtype: torch.dtype, data: st.DataObject) -> None:
    check(dtype, data)
