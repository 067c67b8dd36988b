"""FLOPs, names and checkpoints of the attention operator, by torch's own tools."""

from collections.abc import Callable
from functools import partial
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn
from torch.export import export
from torch.profiler import ProfilerActivity, profile
from torch.utils.checkpoint import CheckpointPolicy, checkpoint, create_selective_checkpoint_contexts, noop_context_fn
from torch.utils.flop_counter import FlopCounterMode, sdpa_backward_flop_count, sdpa_flop_count

import saccade as sc
from saccade import masks
from saccade.nn import MultiHeadAttention

pytestmark = [pytest.mark.ci, pytest.mark.filterwarnings("ignore")]

BATCH, HEADS, LENGTH, WIDTH = 2, 4, 300, 8
MASKS: dict[str, Callable[[], masks.Mask | None]] = {
    "none": lambda: None,
    "causal": masks.Causal,
    "window": lambda: masks.Causal() & masks.Window(20, 0),
    "padding": lambda: masks.Causal() & masks.Padding([LENGTH, 70]),
    "documents": lambda: masks.Documents([100, 200], rule=masks.Causal()),
    "dense": lambda: masks.Dense(torch.rand(LENGTH, LENGTH) < 0.5),
}


class _Attention(nn.Module):
    def __init__(self, mask: masks.Mask | None):
        super().__init__()
        self.mask = mask

    def forward(self, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        return sc.attention(query, key, value, self.mask)


# torch.compile does not run under a dispatch mode, so these tests run the operator of an exported program.


@pytest.mark.parametrize("name", MASKS)
def test_the_pairs_of_the_mask_are_counted_forward_and_backward(name: str) -> None:
    mask = MASKS[name]()
    query = torch.randn(BATCH, HEADS, LENGTH, WIDTH, requires_grad=True)
    key, value = (torch.randn(BATCH, 2, LENGTH, WIDTH, requires_grad=True) for _ in range(2))
    run = export(_Attention(mask), (query, key, value)).module()
    pairs = BATCH * HEADS * LENGTH**2
    if mask is not None:
        pairs = int(mask.to_dense(LENGTH, batch=BATCH, heads=HEADS).sum())
    with FlopCounterMode(display=False) as forward:
        out = run(query, key, value)
    shape = tuple(query.shape)
    every = BATCH * HEADS * LENGTH**2
    assert forward.get_total_flops() * every == sdpa_flop_count(shape, shape, shape) * pairs
    with FlopCounterMode(display=False) as backward:
        out.sum().backward()
    assert backward.get_total_flops() * every == sdpa_backward_flop_count(shape, shape, shape, shape) * pairs


def test_a_profile_shows_the_operator_by_its_name() -> None:
    torch.compiler.reset()
    x = torch.randn(1, 2, 20, 8, requires_grad=True)
    run = torch.compile(lambda x: sc.attention(x, x, x, masks.Causal()), backend="aot_eager", fullgraph=True)
    run(x).sum().backward()
    with profile(activities=[ProfilerActivity.CPU]) as profiled:
        run(x).sum().backward()
    names = {event.key for event in profiled.key_averages()}
    assert {"saccade::product", "saccade::product_backward"} <= names


def test_selective_checkpoints_keep_the_output_of_attention() -> None:
    x = torch.randn(1, 2, 20, 8, requires_grad=True)
    run = export(_Attention(masks.Causal()), (x, x, x)).module()
    product = torch.ops.saccade.product

    def policy(context: object, operation: object, *args: object, **kwargs: object) -> CheckpointPolicy:
        keeps = operation is product.default
        return CheckpointPolicy.MUST_SAVE if keeps else CheckpointPolicy.PREFER_RECOMPUTE

    contexts = {"kept": partial(create_selective_checkpoint_contexts, policy), "recomputed": noop_context_fn}
    once = 2 * 2 * (20 * 21 // 2) * (8 + 8)
    for name, times in (("kept", 1), ("recomputed", 2)):
        with FlopCounterMode(display=False) as counted:
            out = checkpoint(lambda x: run(x, x, x).sin(), x, use_reentrant=False, context_fn=contexts[name])
            x.grad = None
            out.sum().backward()
        assert counted.get_flop_counts()["Global"][product] == times * once
        expected = sc.attention(x, x, x, masks.Causal()).sin()
        torch.testing.assert_close((out, x.grad), (expected, torch.autograd.grad(expected.sum(), x)[0]))


def test_torchscript_is_refused_in_favour_of_export() -> None:
    layer = MultiHeadAttention(8, 2, mask=masks.Causal()).eval()
    with pytest.raises(sc.UnsupportedError, match=r"torch\.export\.export\(model, args\)"):
        torch.jit.trace(layer, (torch.randn(2, 5, 8),))


@pytest.mark.filterwarnings("ignore")
def test_the_exporter_of_torchscript_is_refused_in_favour_of_export(tmp_path: Path) -> None:
    layer = MultiHeadAttention(8, 2, mask=masks.Causal()).eval()
    for model in (layer, torch.nn.Sequential(layer)):
        with pytest.raises(sc.UnsupportedError, match=r"torch\.onnx\.export\(model, args, dynamo=True\)"):
            torch.onnx.export(model, (torch.randn(2, 5, 8),), tmp_path / "layer.onnx", dynamo=False)
