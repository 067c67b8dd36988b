"""Attention as ONNX models compute it: the same numbers as the kernels, in onnxruntime too where it is installed."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from tests.sampled import kept
from torch import Tensor, nn
from torch.export import Dim

import saccade as sc
from saccade import masks, positions, scores
from saccade.engine import onnx_form
from saccade.engine.dispatch import postprocessed
from saccade.engine.inputs import AttentionInputs
from saccade.engine.kernels.kernel import Request
from saccade.nn import MultiHeadAttention

N = 9
MASKS: dict[str, Any] = {
    "none": None,
    "causal": masks.Causal(),
    "window": masks.Causal() & masks.Window(2, 0) | masks.Global([0]),
    "not": ~masks.Causal(),
    "padding": masks.Padding([N, 4]) & masks.Causal(),
    "documents": masks.Documents([[4, 5], [9]], rule=masks.Causal()),
    "pairs": torch.rand(2, 1, N, N, generator=torch.Generator().manual_seed(0)) < 0.3,
    "nothing": torch.zeros(N, N, dtype=torch.bool),
}
OPTIONS: dict[str, Callable[[], dict[str, Any]]] = {
    "plain": dict,
    "scale": lambda: {"scale": 0.3},
    "softcap": lambda: {"softcap": 2.0},
    "bias": lambda: {"bias": torch.randn(1, 4, N, N)},
    "alibi": lambda: {"bias": positions.ALiBi(4)},
    "sink": lambda: {"sink_logit": torch.randn(4)},
    "cosine": lambda: {"score": scores.Cosine(), "scale": 4.0},
}


def _attended(q: Tensor, k: Tensor, v: Tensor, mask: Any, needs_lse: bool, **options: Any) -> tuple[Tensor, Any]:
    inputs = AttentionInputs.of(q, k, mask, **options)
    out, lse = onnx_form.attend(inputs, v, Request(needs_lse=needs_lse))
    return (out, None) if lse is None else postprocessed(inputs, out, lse)


@pytest.mark.parametrize("option", OPTIONS)
@pytest.mark.parametrize("name", MASKS)
def test_the_form_for_onnx_gives_the_numbers_of_the_kernels(name: str, option: str) -> None:
    torch.manual_seed(0)
    q, k, v, options = torch.randn(2, 4, N, 8), torch.randn(2, 2, N, 8), torch.randn(2, 2, N, 6), OPTIONS[option]()
    expected, lse = sc.attention_with_lse(q, k, v, MASKS[name], **options)
    for needs_lse in (False, True):
        with torch.no_grad():
            out, own = _attended(q, k, v, MASKS[name], needs_lse, **options)
        torch.testing.assert_close(out, expected, atol=1e-5, rtol=1e-5)
        if own is not None:
            torch.testing.assert_close(own, lse, atol=1e-5, rtol=1e-5)


def test_more_keys_than_queries_are_aligned_at_the_end() -> None:
    q, k = torch.randn(1, 2, 3, 8), torch.randn(1, 2, 7, 8)
    out, _ = _attended(q, k, k, masks.Causal(), False)
    torch.testing.assert_close(out, sc.attention(q, k, k, masks.Causal()), atol=1e-5, rtol=1e-5)


def test_onnx_refuses_dropout_and_functions_of_scores() -> None:
    x = torch.randn(1, 1, 4, 4)
    with pytest.raises(sc.UnsupportedError, match=r"torch\.onnx\.export cannot run these inputs") as refused:
        onnx_form.attend(AttentionInputs.of(x, x, score=lambda s, b, h, q, kv: s * 2), x, Request(dropout_p=0.5))
    assert len(refused.value.reasons) == 2


class Masked(nn.Module):
    def __init__(self, mask_of: Callable[[Tensor], Any]):
        super().__init__()
        mask = masks.Causal() & masks.Window(4, 0)
        self.layer, self.mask_of = MultiHeadAttention(16, 4, num_kv_heads=2, mask=mask), mask_of

    def forward(self, x: Tensor, tensor: Tensor) -> Tensor:
        out: Tensor = self.layer(x, mask=self.mask_of(tensor))
        return out


def _tokens(n: int) -> Tensor:
    return torch.arange(n) < torch.tensor([[n], [4]])


def _ids(n: int) -> Tensor:
    return torch.cat([torch.arange(4), torch.arange(n - 4)])[None].repeat(2, 1)


IN_A_LAYER: dict[str, tuple[Callable[[int], Tensor], Callable[[Tensor], Any]]] = {
    "bool tensor": (_tokens, lambda x: x[:, None, None, :]),
    "attention mask": (_tokens, masks.from_attention_mask),
    "key padding mask": (lambda n: ~_tokens(n), masks.from_key_padding_mask),
    "position ids": (_ids, masks.from_position_ids),
}


@pytest.mark.ci
@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("name", kept(IN_A_LAYER, "attention mask", "position ids"))
def test_onnxruntime_runs_layers_at_every_length(name: str, tmp_path: Path) -> None:
    pytest.importorskip("onnxscript", reason="torch.onnx.export needs onnxscript")
    runtime = pytest.importorskip("onnxruntime", reason="the exported file is run by onnxruntime")
    tensor_of, mask_of = IN_A_LAYER[name]
    model, shapes = Masked(mask_of).eval(), {1: Dim("length", min=2, max=512)}
    program = torch.onnx.export(
        model, (torch.randn(2, 9, 16), tensor_of(9)), dynamo=True, opset_version=23, dynamic_shapes=(shapes, shapes)
    )
    assert program is not None
    program.save(tmp_path / "layer.onnx")
    session = runtime.InferenceSession(tmp_path / "layer.onnx", providers=["CPUExecutionProvider"])
    for n in (9, 14):
        x, tensor = torch.randn(2, n, 16), tensor_of(n)
        names = [one.name for one in session.get_inputs()]
        (out,) = session.run(None, dict(zip(names, (x.numpy(), tensor.numpy()), strict=True)))
        np.testing.assert_allclose(out, model(x, tensor).detach().numpy(), atol=1e-5)


@pytest.mark.ci
@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("opset", kept([None, 18, 23], 18, 23))
def test_opsets_without_an_attention_operator_get_plain_operations(opset: int | None, tmp_path: Path) -> None:
    pytest.importorskip("onnxscript", reason="torch.onnx.export needs onnxscript")
    runtime = pytest.importorskip("onnxruntime", reason="the exported file is run by onnxruntime")
    layer, x = MultiHeadAttention(16, 4, mask=masks.Causal()).eval(), torch.randn(2, 9, 16)
    program = torch.onnx.export(layer, (x,), dynamo=True, opset_version=opset, verbose=False)
    assert program is not None
    assert ("Attention" in {node.op_type for node in program.model.graph}) == (opset == 23)
    program.save(tmp_path / "layer.onnx")
    session = runtime.InferenceSession(tmp_path / "layer.onnx", providers=["CPUExecutionProvider"])
    (out,) = session.run(None, {session.get_inputs()[0].name: x.numpy()})
    np.testing.assert_allclose(out, layer(x).detach().numpy(), atol=1e-5)
