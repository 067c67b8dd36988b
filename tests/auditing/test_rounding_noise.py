"""The measure of differences, the noise of rounding, and float64 that is one, against numbers worked out by hand."""

import math

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from saccade.auditing.float64 import TrueFloat64, float64_copy
from saccade.auditing.rounding_noise import jitter, relative, row_differences


@pytest.mark.parametrize(
    "a, b, told",
    [
        ([3.0, 4.0], [3.0, 4.0], 0.0),
        ([3.0, 5.0], [3.0, 4.0], 1 / math.sqrt(12.5)),
        ([math.nan, 4.0], [math.nan, 4.0], 0.0),
        ([math.nan, 4.0], [3.0, 4.0], math.inf),
        ([3.0, 4.0], [math.nan, 4.0], math.inf),
        ([math.inf, 4.0], [math.inf, 4.0], 0.0),
        ([math.inf, 4.0], [-math.inf, 4.0], math.inf),
        ([0.0, 0.0], [0.0, 0.0], 0.0),
        ([0.0, 1.0], [0.0, 0.0], math.inf),
        ([math.nan], [math.nan], 0.0),
        ([], [], 0.0),
    ],
)
def test_differences_are_relative_to_the_expected_size(a: list[float], b: list[float], told: float) -> None:
    assert relative(torch.tensor(a), torch.tensor(b)) == pytest.approx(told)


def test_rows_are_measured_separately() -> None:
    b = torch.ones(2, 3, 4)
    a = b.clone()
    a[1, 2, 0] += 0.5
    assert row_differences(a, b).tolist() == [[0, 0, 0], [0, 0, 0.5]]


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16, torch.float16])
def test_the_noise_of_one_module_is_one_unit(dtype: torch.dtype) -> None:
    x = torch.tensor([[1.5, -1.5, 0.0, math.inf]], dtype=dtype)
    seen = []

    def run() -> Tensor:
        seen.append(identity(x))
        return seen[-1]

    identity = nn.Identity()
    unit = torch.finfo(dtype).eps
    assert jitter(identity, run) == pytest.approx(unit / math.sqrt(1.5))
    assert torch.equal(seen[0], x)
    for moved in seen[1:]:
        assert (moved - x)[0, :2].abs().tolist() == [unit, unit]
        assert torch.equal(moved[0, 2:], x[0, 2:])


def test_noise_reaches_what_a_module_returns_beside_its_first_tensor() -> None:
    model = nn.LSTM(4, 4)
    x = torch.randn(3, 4)
    assert jitter(model, lambda: model(x)[1][0]) > 0


def test_noise_is_that_of_its_seed_and_leaves_no_hook() -> None:
    model = nn.Sequential(nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 8))
    x, seen = torch.randn(4, 8), []

    def run() -> Tensor:
        seen.append(model(x))
        return seen[-1]

    for seed in (0, 0, 1):
        assert 0 < jitter(model, run, repeats=2, seed=seed) < 1e-5
    first, again, other = (torch.stack(seen[start : start + 3]) for start in (0, 3, 6))
    assert torch.equal(first, again)
    assert not torch.equal(first, other)
    assert not any(part._forward_hooks for part in model.modules())


def test_hooks_go_when_the_model_raises() -> None:
    model, calls = nn.Linear(2, 2), []

    def run() -> Tensor:
        calls.append(1)
        if len(calls) == 2:
            raise RuntimeError("second")
        return model(torch.ones(1, 2))

    with pytest.raises(RuntimeError, match="second"):
        jitter(model, run)
    assert not model._forward_hooks


class Norm(nn.Module):
    """The norm of Llama, which computes in float32 by name."""

    def forward(self, x: Tensor) -> Tensor:
        wide = x.to(torch.float32)
        return (wide * torch.rsqrt(wide.float().pow(2).mean(-1, keepdim=True) + 1e-6)).to(x.dtype)


def test_float64_is_float64_throughout() -> None:
    x = torch.randn(5, 16, dtype=torch.float64)
    right = x.numpy() / np.sqrt((x.numpy() ** 2).mean(-1, keepdims=True) + 1e-6)
    assert np.abs(Norm()(x).numpy() - right).max() > 1e-9
    with TrueFloat64():
        told = Norm()(x)
        assert torch.arange(3).float().dtype is torch.float64
        assert torch.zeros(3, dtype=torch.float32).dtype is torch.float64
    np.testing.assert_allclose(told.numpy(), right, rtol=1e-14)


def test_a_copy_runs_in_float64_and_the_model_stays() -> None:
    model = nn.Linear(3, 3)
    wide, reason = float64_copy(model, lambda copied: copied(torch.ones(1, 3, dtype=torch.float64)))
    assert wide is not None
    assert next(wide.parameters()).dtype is torch.float64
    assert next(model.parameters()).dtype is torch.float32
    assert reason == ""


@pytest.mark.parametrize(
    "run, reason",
    [
        (lambda copied: copied(torch.ones(1, 3, dtype=torch.float16)), "RuntimeError: "),
        (lambda copied: torch.ones(1), "its outputs stay torch.float32"),
    ],
)
def test_a_copy_that_does_not_run_so_says_why(run: object, reason: str) -> None:
    wide, why = float64_copy(nn.Linear(3, 3), run)  # type: ignore[arg-type]
    assert wide is None
    assert why.startswith(reason)
