"""The figures of GPUs: the question runs, and says so where there is none."""

import pytest
import torch
from benchmarks.measuring import Referee

from benchmarks import gpu


def test_without_a_gpu_it_says_so(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    (row,) = gpu.measure(Referee(samples=1, patience=0.0, most_rounds=1))
    assert "there is no CUDA device here" in row.measured
    assert row.met is None


@pytest.mark.slow  # it compiles
@pytest.mark.filterwarnings("ignore")
def test_it_runs(monkeypatch):
    """On a processor, with sizes of a test, where kernels for processors stand for those of a GPU."""
    for name, value in {"PLAIN": (64,), "LONG": (256,), "DECODE": 64, "LOOK": 64, "ROUNDS": 1}.items():
        monkeypatch.setattr(gpu, name, value)
    monkeypatch.setattr(gpu, "SPARSE", {"window": gpu.masks.sliding_window(30)})
    with torch.no_grad():
        sparse = list(gpu._sparse(Referee(samples=1, patience=0.0, most_rounds=1), "cpu"))
    assert [row.case for row in sparse] == ["window, 256, forward"]
    monkeypatch.setattr(gpu, "SPARSE", {})
    rows = list(gpu.measure(Referee(samples=1, patience=0.0, most_rounds=1), "cpu"))
    assert len(rows) == 4 + 1 + 3
    assert all(row.figures for row in rows)
