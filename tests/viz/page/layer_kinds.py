"""Layers of every kind, each with its dense weights and what its mask allows."""

from typing import NamedTuple

import numpy as np
import torch
from tests.mechanisms.recurrence_definitions import RULES

import saccade as sc
from saccade import masks
from saccade.mechanisms import Linear, Performer

__all__ = ["CASES", "Case", "attention", "random_weights"]


class Case(NamedTuple):
    """Something to look at: dense ``[batch, heads, q_len, kv_len]``, and bool of the same shape."""

    given: object
    dense: np.ndarray
    allowed: np.ndarray
    is_signed: bool = False


def inputs(q_len, kv_len, heads=4, kv_heads=2, sharpness=2.0):
    generator = torch.Generator().manual_seed(q_len + kv_len)
    q = sharpness * torch.randn(2, heads, q_len, 8, generator=generator)
    return q, torch.randn(2, kv_heads, kv_len, 8, generator=generator)


def attention(q_len, kv_len, mask=None, **options):
    return sc.AttentionMatrix(*inputs(q_len, kv_len, **options), mask)


def random_weights(*shape):
    """Weights that somebody else has written out; some rows are 0."""
    weights = torch.randn(*shape, generator=torch.Generator().manual_seed(1)).softmax(-1)
    weights[:, :, 1::7] = 0.0
    return weights


def of(matrix, mask=None, *, is_signed=False):
    dense = matrix.to_dense(limit=1 << 40).numpy()
    allowed = np.ones(dense.shape, bool)
    if mask is not None:
        batch, heads = dense.shape[:2]
        allowed = mask.to_dense(*dense.shape[2:], batch=batch, heads=heads).expand(dense.shape).numpy()
    return Case(matrix, dense, allowed, is_signed)


def softmax(q_len, kv_len, mask=None, **options):
    return of(attention(q_len, kv_len, mask, **options), mask)


def of_weights(weights, given=None, *, is_signed=False):
    dense = weights.double().numpy()
    return Case(weights if given is None else given, dense, dense != 0, is_signed)


def delta(length):
    q, k = inputs(length, length, kv_heads=4)
    return of(RULES["gated delta"](q, k, mask=masks.Causal()), masks.Causal(), is_signed=True)


def sink(length):
    q, k = inputs(length, length)
    k[:, :, 0] *= 4
    k[:, :, 0, 0] = 9
    q[..., 0] = q[..., 0].abs() + 1
    return of(sc.AttentionMatrix(q, k, masks.Causal()), masks.Causal())


SPARSE = masks.Causal() & (masks.Window(60, 0) | masks.Global([0]))
BY_HEAD = masks.Predicate(lambda b, h, q, kv: (q // 30 + h + b) % 3 >= kv // 70)
PADDED = masks.Causal() & masks.Padding([40, 33])
_WRITTEN = random_weights(2, 3, 30, 41)
_SIGNED = torch.randn(2, 2, 150, 170, generator=torch.Generator().manual_seed(4))
_WIDE = torch.randn(2, 2, 150, 500, generator=torch.Generator().manual_seed(5))
_WIDE[..., 5] = 99.0

CASES = {
    "causal": lambda: softmax(40, 40, masks.Causal()),
    "padded": lambda: softmax(40, 40, PADDED),
    "causal-300": lambda: softmax(300, 300, masks.Causal()),
    "window-and-sink": lambda: softmax(300, 300, SPARSE),
    "sink": lambda: sink(200),
    "sink-short": lambda: sink(60),
    "heads-apart": lambda: softmax(200, 200, BY_HEAD),
    "few-queries": lambda: softmax(7, 300, masks.Causal()),
    "many-queries": lambda: softmax(150, 9),
    "fine": lambda: softmax(1100, 1300, SPARSE, heads=2, kv_heads=1),
    "one-token": lambda: softmax(1, 1, heads=1, kv_heads=1),
    "one-query": lambda: softmax(1, 50),
    "one-key": lambda: softmax(50, 1),
    "sharp": lambda: softmax(50, 50, sharpness=60.0),
    "linear": lambda: of(Linear()(*inputs(150, 150), mask=masks.Causal()), masks.Causal()),
    "performer": lambda: of(Performer(16)(*inputs(40, 60)[:2])),
    "delta": lambda: delta(40),
    "delta-150": lambda: delta(150),
    "written": lambda: of_weights(_WRITTEN),
    "float16": lambda: of_weights(_WRITTEN.half()),
    "bfloat16": lambda: of_weights(_WRITTEN.bfloat16()),
    "float64": lambda: of_weights(_WRITTEN.double(), _WRITTEN.double().numpy()),
    "numpy": lambda: of_weights(_WRITTEN, _WRITTEN.numpy()),
    "numpy-reversed": lambda: of_weights(_WRITTEN.flip(2), _WRITTEN.numpy()[:, :, ::-1]),
    "whole-numbers": lambda: of_weights((9 * _WRITTEN).long()),
    "with-gradient": lambda: of_weights(_WRITTEN, _WRITTEN.clone().requires_grad_()),
    "less-than-one": lambda: of_weights(0.3 * _WRITTEN),
    "signed": lambda: of_weights(_SIGNED, is_signed=True),
    "signed-sink": lambda: of_weights(_WIDE, is_signed=True),
}
