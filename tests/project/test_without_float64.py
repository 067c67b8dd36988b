"""A device that has no float64, as Apple's GPUs: nothing asks it for one."""

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

import saccade as sc
from saccade import masks, nn, positions, scores, statistics, testing
from saccade.mechanisms import S4D, Linear


class WithoutFloat64(TorchDispatchMode):
    """Refuses every operation that makes a tensor of float64."""

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        made = func(*args, **(kwargs or {}))
        for x in tree_leaves(made):
            if isinstance(x, torch.Tensor) and x.dtype in (torch.float64, torch.complex128):
                raise TypeError(f"{func}: this device has no float64")
        return made


@pytest.fixture
def without_float64(monkeypatch):
    monkeypatch.setattr("saccade.support.numerics._WITHOUT_FLOAT64", frozenset(["cpu"]))
    with WithoutFloat64():
        yield


def inputs():
    query, key, value = (torch.randn(2, heads, 40, 16).requires_grad_() for heads in (4, 2, 2))
    return query, key, value


def test_the_mode_refuses_it(without_float64):
    with pytest.raises(TypeError, match="this device has no float64"):
        torch.randn(3).double()


@pytest.mark.parametrize("impl", ["tiled", "sdpa", "reference"])
def test_products(impl, without_float64):
    query, key, value = inputs()
    sc.attention(query, key, value, masks.Causal(), impl=impl).square().sum().backward()
    assert query.grad.isfinite().all()
    assert testing.first_use(impl, query, key, value, masks.Causal()).raise_if_wrong().ok
    if impl != "sdpa":
        options = {"bias": positions.T5(4), "softcap": 5.0, "sink_logit": torch.zeros(4)}
        sc.attention(query, key, value, masks.longformer(5, [0]), dropout_p=0.1, impl=impl, **options).sum().backward()
        spoilt = key.detach().clone()
        spoilt[0, 0, 30] = torch.nan
        assert sc.attention(query, spoilt, value, masks.Causal(), impl=impl)[0, 0, :30].isfinite().all()


def test_scores_and_layers(without_float64):
    query, key, value = inputs()
    sc.attention(query, key, value, score=scores.Additive(16, 16, 4)).sum().backward()
    x = torch.randn(2, 30, 32) + positions.Sinusoidal(32)(range(30))
    layer = nn.MultiHeadAttention(32, 4, rotary=positions.Rotary(8), mask=masks.Causal())
    layer(x).sum().backward()
    modes = S4D(4, 8).modes()
    assert modes.weight.dtype == torch.complex64


def test_questions(without_float64):
    query, key, _ = inputs()
    A = sc.AttentionMatrix(query.detach(), key.detach(), masks.Causal(), impl="tiled")
    summary = A.summary()
    assert all(measure.values.isfinite().all() for measure in summary.measures)
    assert A.received().dtype == torch.float32
    A.entropy(), A.topk(3), A.pooled(8)
    A.compute(statistics.LagProfile())


def test_comparisons(without_float64):
    query, key, value = (x.detach() for x in inputs())
    assert "Linear" in str(sc.compare(query, key, value, [Linear()]))
