"""The definition itself, against loops over Python floats that know nothing but ``math``."""

import ast
import math
from pathlib import Path

import pytest
import torch

from saccade.testing import oracle


def by_hand(query, keys, values, allowed, bias, scale, softcap):
    """One row of one head, from lists of floats: (output, lse)."""
    scores = []
    for key, extra in zip(keys, bias, strict=True):
        score = scale * sum(a * b for a, b in zip(query, key, strict=True))
        score = score if softcap is None else softcap * math.tanh(score / softcap)
        scores.append(score + extra)
    powers = [math.exp(score) if may else 0.0 for score, may in zip(scores, allowed, strict=True)]
    total = sum(powers)
    if not total:
        return [0.0] * len(values[0]), -math.inf
    out = [sum(p * value[e] for p, value in zip(powers, values, strict=True)) / total for e in range(len(values[0]))]
    return out, math.log(total)


@pytest.mark.parametrize("softcap", [None, 0.8])
@pytest.mark.parametrize("scale", [None, 0.0, 1.3])
def test_oracle_equals_loops_over_floats(scale, softcap):
    generator = torch.Generator().manual_seed(3)
    query = torch.randn(2, 4, 3, 5, generator=generator, dtype=torch.float64)
    key = torch.randn(2, 2, 6, 5, generator=generator, dtype=torch.float64)
    value = torch.randn(2, 2, 6, 2, generator=generator, dtype=torch.float64)
    bias = torch.randn(2, 4, 3, 6, generator=generator, dtype=torch.float64)
    allowed = torch.rand(2, 4, 3, 6, generator=generator) < 0.5
    allowed[0, 1, 2] = False
    out, lse = oracle.attention(query, key, value, allowed, bias=bias, scale=scale, softcap=softcap)
    for b in range(2):
        for h in range(4):
            for i in range(3):
                want = by_hand(
                    query[b, h, i].tolist(),
                    key[b, h // 2].tolist(),
                    value[b, h // 2].tolist(),
                    allowed[b, h, i].tolist(),
                    bias[b, h, i].tolist(),
                    5**-0.5 if scale is None else scale,
                    softcap,
                )
                assert out[b, h, i].tolist() == pytest.approx(want[0], abs=1e-14)
                assert lse[b, h, i].item() == pytest.approx(want[1], abs=1e-14)


def test_oracle_on_numbers_one_can_check_in_the_head():
    # Scores 0 and ln 3, so the weights are 1/4 and 3/4.
    query = torch.tensor([[[[1.0]]]])
    key = torch.tensor([[[[0.0], [math.log(3)]]]], dtype=torch.float64)
    value = torch.tensor([[[[4.0, 0.0], [0.0, 8.0]]]])
    out, lse = oracle.attention(query, key, value, torch.tensor([[[[True, True]]]]))
    assert out.flatten().tolist() == pytest.approx([1.0, 6.0])
    assert lse.item() == pytest.approx(math.log(4))


def test_a_row_that_sees_nothing_has_no_gradient():
    query, key, value = (torch.ones(1, 1, 2, 3, dtype=torch.float64, requires_grad=True) for _ in range(3))
    allowed = torch.tensor([[[[False, False], [True, False]]]])
    out, lse = oracle.attention(query, key, value, allowed)
    assert out[0, 0, 0].tolist() == [0.0, 0.0, 0.0]
    assert lse[0, 0, 0] == -math.inf
    (out.sum() + lse[0, 0, 1]).backward()
    assert query.grad[0, 0, 0].tolist() == [0.0, 0.0, 0.0]
    assert torch.isfinite(key.grad).all()
    assert value.grad[0, 0].tolist() == [[1.0] * 3, [0.0] * 3]


@pytest.mark.parametrize(("q_len", "kv_len", "batch"), [(0, 3, 1), (3, 0, 1), (0, 0, 1), (3, 3, 0)])
def test_zero_lengths(q_len, kv_len, batch):
    query, key = torch.ones(batch, 2, q_len, 4), torch.ones(batch, 1, kv_len, 4)
    out, lse = oracle.attention(query, key, key, torch.ones(batch, 2, q_len, kv_len, dtype=torch.bool))
    assert out.shape == (batch, 2, q_len, 4)
    assert (out == (1.0 if kv_len else 0.0)).all()
    assert (lse.isneginf() == (kv_len == 0)).all()


def test_it_imports_nothing_but_torch():
    tree = ast.parse(Path(oracle.__file__).read_text(encoding="utf-8"))
    imported = {alias.name for node in ast.walk(tree) if isinstance(node, ast.Import) for alias in node.names}
    imported |= {node.module for node in ast.walk(tree) if isinstance(node, ast.ImportFrom)}
    assert imported - {"collections.abc"} == {"torch"}  # the other is the name of a type
