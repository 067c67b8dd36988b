"""Entropy and column sums from products alone are what a sweep finds."""

import pytest
import torch

import saccade as sc
from saccade import masks
from saccade.engine import statistics_from_products
from saccade.statistics import Entropy, Received, TopK
from saccade.testing import CASES, LARGE_CASES


@pytest.fixture
def by_products(monkeypatch):
    """Compute statistics from products, as on a GPU: processors have sweeps of their own."""
    monkeypatch.setattr(statistics_from_products, "_KERNELS", ("fused",))


def matrix_of(case, dtype):
    problem = case.problem(dtype)
    return sc.AttentionMatrix(problem.query, problem.key, problem.mask, **problem.options, **problem.positions)


@pytest.mark.ci
@pytest.mark.usefixtures("by_products", "without_native")
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_they_are_those_of_a_sweep(dtype):
    tried = set()
    for case in (*CASES[::2], *LARGE_CASES[::2]):
        matrix = matrix_of(case, dtype)
        given = matrix.inputs.current()
        if not statistics_from_products.can_use_products(given, "auto"):
            continue
        found = statistics_from_products.statistics_from_products(given, "auto", statistics_from_products.NAMES)
        received, entropy = matrix.compute(Received(), Entropy())
        torch.testing.assert_close(found["entropy"], entropy.float(), atol=2e-5, rtol=1e-5)
        tried.add("entropy")
        if "received" in found:
            torch.testing.assert_close(found["received"], received.float(), atol=2e-5, rtol=1e-5)
            torch.testing.assert_close(
                statistics_from_products.statistics_from_products(given, "auto", {"received"})["received"],
                found["received"],
            )
            tried.add(str(given.rule))
    assert len(tried) > 15


@pytest.mark.usefixtures("by_products", "without_native")
def test_inputs_without_statistics_from_products():
    query, key = torch.randn(2, 1, 2, 30, 16)

    def can(*tensors, **options):
        return statistics_from_products.can_use_products(sc.AttentionMatrix(*tensors, **options).inputs, "auto")

    assert can(query, key)
    assert not can(query, key, softcap=2.0)
    assert not can(query, key, sink_logit=torch.zeros(2))
    assert not can(query, key, bias=torch.zeros(1, 1, 30, 30))
    assert not can(query, 100 * key)  # a difference of large numbers
    assert not can(query[:, :, :0], key)
    spoilt = key.clone()
    spoilt[0, 0, 3, 0] = torch.nan
    assert not can(query, spoilt, masks.Causal())
    assert not statistics_from_products.can_use_products(sc.AttentionMatrix(query, key).inputs, "tiled")


@pytest.mark.gpu
def test_on_a_gpu():
    query, key = torch.randn(2, 1, 4, 8192, 64, device="cuda", dtype=torch.bfloat16)
    matrix = sc.AttentionMatrix(query, key, masks.sliding_window(1024))
    expected = sc.AttentionMatrix(query.cpu(), key.cpu(), masks.sliding_window(1024))
    answers = zip(
        matrix.compute(Entropy(), Received(), TopK(2)), expected.compute(Entropy(), Received(), TopK(2)), strict=True
    )
    for got, want in list(answers)[:2]:
        torch.testing.assert_close(got.cpu(), want, atol=2e-4, rtol=1e-4)
