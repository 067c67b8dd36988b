"""The mesa layer: ridges of their own for each head, few queries, second derivatives, and wrong arguments."""

import pytest
import torch
from torch import Tensor, nn

from saccade import masks
from saccade.mechanisms import Mesa

CAUSAL = masks.Causal()


def draw(length: int, dtype: torch.dtype = torch.float64) -> tuple[Tensor, ...]:
    """Query, key and value, with two key heads for four query heads, and beta for each key head."""
    torch.manual_seed(0)
    query = torch.randn(2, 4, length, 5, dtype=dtype)
    key, value = torch.randn(2, 2, 2, length, 5, dtype=dtype)
    return query, nn.functional.normalize(key, dim=-1), value, torch.rand(2, 2, length, dtype=dtype)


def defined(query: Tensor, key: Tensor, value: Tensor, beta: Tensor, ridge: Tensor) -> Tensor:
    """The ridge regression of the values so far, solved anew for each token."""
    key, value, beta = (x.repeat_interleave(2, 1) for x in (key, value, beta))
    rows = []
    for i in range(1, key.shape[2] + 1):
        k, v, b = key[:, :, :i], value[:, :, :i], beta[:, :, :i, None]
        solution = torch.linalg.solve((b * k).mT @ k + torch.diag_embed(ridge), (b * k).mT @ v)
        rows.append((query[:, :, i - 1, None] @ solution)[:, :, 0])
    return torch.stack(rows, 2)


@pytest.mark.parametrize("length", [1, 33, 70])
def test_a_trained_ridge_for_each_head_is_that_of_the_definition(length: int) -> None:
    ridge = nn.Parameter(torch.rand(4, 5, dtype=torch.float64) + 0.1)
    mechanism, given = Mesa(ridge), draw(length)
    query, key, value, beta = leaves = [x.requires_grad_() for x in given]
    out, expected = mechanism(query, key, beta=beta, mask=CAUSAL) @ value, defined(*leaves, ridge)
    torch.testing.assert_close(out, expected, atol=1e-11, rtol=1e-10)
    grad = torch.randn_like(out)
    own, theirs = (torch.autograd.grad(x, [*leaves, ridge], grad) for x in (out, expected))
    torch.testing.assert_close(own, theirs, atol=1e-9, rtol=1e-9)


@pytest.mark.parametrize("count", [0, 1, 40])
def test_few_queries_are_the_last_rows(count: int) -> None:
    query, key, value, beta = draw(70)
    whole = Mesa(0.3)(query, key, beta=beta, mask=CAUSAL) @ value
    last = Mesa(0.3)(query[:, :, 70 - count :], key, beta=beta, mask=CAUSAL) @ value
    torch.testing.assert_close(last, whole[:, :, 70 - count :], atol=1e-12, rtol=1e-10)


@pytest.mark.parametrize("part", range(3))
def test_second_derivatives_of_one_input(part: int) -> None:
    given = [x[:1, :, :35] for x in draw(35)[:3]]

    def run(x: Tensor) -> Tensor:
        query, key, value = (x if i == part else other for i, other in enumerate(given))
        return Mesa(0.5)(query, key, mask=CAUSAL) @ value

    assert torch.autograd.gradgradcheck(run, [given[part].clone().requires_grad_()], fast_mode=True)


@pytest.mark.parametrize(
    ("ridge", "options", "rule"),
    [
        (0.0, {}, "ridge must be"),
        (torch.tensor([[0.5, -1.0, 1.0, 1.0, 1.0]]), {}, "ridge must be above 0 and finite; got -1"),
        (torch.tensor([[torch.nan]]), {}, "ridge must be above 0 and finite; got nan"),
        (torch.tensor([[torch.inf]]), {}, "ridge must be above 0 and finite; got inf"),
        (torch.ones(5), {}, r"ridge must be a number or a float tensor \[heads \| 1, head_dim\]"),
        (torch.ones(3, 5), {}, r"ridge must have shape \[4 \| 1, 5\]"),
        (1.0, {"beta": torch.tensor([torch.nan, -2.0, 1.0]).expand(2, 2, 3)}, "beta must be at least 0; got -2"),
        (1.0, {"decay": torch.full((2, 2, 3, 5), -0.1)}, "decay must have one value for each token"),
    ],
)
def test_wrong_arguments_are_refused(ridge: float | Tensor, options: dict[str, Tensor], rule: str) -> None:
    query, key, value, _ = draw(3, torch.float32)
    with pytest.raises(ValueError, match=rule):
        Mesa(ridge)(query, key, mask=CAUSAL, **options) @ value


def test_a_ridge_below_the_rounding_error_is_refused() -> None:
    query, key, value, _ = draw(50, torch.float32)
    mechanism = Mesa(1e-6)
    with pytest.raises(ValueError, match=r"ridge must be large enough that .* in torch.float32; got 1e-06"):
        mechanism(query, torch.full_like(key, 30.0), mask=CAUSAL) @ value
    wide = mechanism(query.double(), torch.full_like(key, 30.0).double(), mask=CAUSAL) @ value.double()
    assert wide.isfinite().all()
