"""Torch's own ring attention, which is private, as a witness written by others: the same outputs and gradients."""

import pytest
import torch
import torch.distributed as dist
from tests.distributed.gloo_processes import on_ranks

from saccade import masks
from saccade.distributed import ContextParallel

ring = pytest.importorskip(
    "torch.distributed.tensor.experimental._context_parallel._attention",
    reason="torch has moved its private ring attention",
)


def by_torch(own, grad, is_balanced):
    """Output and gradients of the own rows, causal."""
    ring._cp_options.enable_load_balance = is_balanced
    flash = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu
    backward = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward
    group = dist.group.WORLD
    out, lse = ring._templated_ring_attention(group, 2, flash, *own, is_causal=True)
    grads = ring._templated_ring_attention_backward(
        group, 2, backward, grad, "grad_out", *own, out, lse, is_causal=True, dropout_p=0.0
    )
    return [out, *grads]


def compared(rank, layout):
    cp = ContextParallel(layout=layout)
    torch.manual_seed(0)
    *whole, grad = torch.randn(4, 2, 4, 64, 16)
    own = [cp.shard_sequence(x, 2).contiguous() for x in whole]
    grad = cp.shard_sequence(grad, 2).contiguous()
    want = by_torch(own, grad, layout == "zigzag")
    leaves = [x.clone().requires_grad_() for x in own]
    out = cp.attention(*leaves, masks.Causal())
    got = [out, *torch.autograd.grad(out, leaves, grad)]
    return [float((a - b).detach().abs().max()) for a, b in zip(got, want, strict=True)]


@pytest.mark.slow
@pytest.mark.parametrize("layout", ["contiguous", "zigzag"])
@pytest.mark.parametrize("ranks", [2, 4])
def test_the_ring_of_torch_says_the_same(ranks, layout):
    for errors in on_ranks(ranks, compared, layout):
        assert isinstance(errors, list), errors
        assert max(errors) < 2e-5
