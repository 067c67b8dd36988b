"""A sink's share of a row, alone: results and gradients against the softmax written out with one score more."""

import math

import pytest
import torch
from torch import Tensor

from saccade.engine.bias.sink_logit import with_sink


def _written(out: Tensor, lse: Tensor, sink: Tensor) -> tuple[Tensor, Tensor]:
    of_keys, of_sink = lse.exp(), sink.exp()[None, :, None]
    return out * (of_keys / (of_keys + of_sink))[..., None], (of_keys + of_sink).log()


def test_results_and_gradients_are_those_of_the_softmax_written_out() -> None:
    tensors = [torch.randn(shape, dtype=torch.float64) for shape in ((2, 3, 5, 4), (2, 3, 5), (3,))]
    found = []
    for function in (_written, with_sink):
        leaves = [x.clone().requires_grad_() for x in tensors]
        out, lse = function(*leaves)
        found.append((out.detach(), lse.detach(), *torch.autograd.grad(out.sin().sum() + lse.sin().sum(), leaves)))
    torch.testing.assert_close(found[1], found[0])


def test_a_row_that_sees_nothing_stays_so_and_moves_nothing() -> None:
    out, lse = torch.randn(1, 2, 3, 4, dtype=torch.float64), torch.randn(1, 2, 3, dtype=torch.float64)
    out[:, :, 1], lse[:, :, 1] = 0.0, -math.inf
    leaves = [x.requires_grad_() for x in (out, lse, torch.randn(2, dtype=torch.float64))]
    results = with_sink(*leaves)
    assert not results[0][:, :, 1].any()
    assert results[1][:, :, 1].isneginf().all()
    of_out, of_lse, of_sink = torch.autograd.grad(results, leaves, [torch.ones_like(x) for x in results])
    assert not of_out[:, :, 1].any()
    assert not of_lse[:, :, 1].any()
    assert of_sink.isfinite().all()


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32, torch.float64], ids=str)
def test_the_output_keeps_its_dtype(dtype: torch.dtype) -> None:
    wide = torch.float64 if dtype == torch.float64 else torch.float32
    out, lse = with_sink(
        torch.ones(1, 2, 3, 4, dtype=dtype), torch.zeros(1, 2, 3, dtype=wide), torch.zeros(2, dtype=wide)
    )
    assert (out.dtype, lse.dtype) == (dtype, wide)
    torch.testing.assert_close(out, torch.full_like(out, 0.5))
