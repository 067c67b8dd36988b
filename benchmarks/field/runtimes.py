"""Attention of inference runtimes on a CPU: ONNX Runtime and OpenVINO, forward only and in float32."""

from __future__ import annotations

from functools import cache
from typing import Any

import torch
from torch import Tensor

from benchmarks.peers.peer import Library, Peer, imported

__all__ = ["ONNX_RUNTIME", "OPENVINO", "by_onnx_runtime", "by_openvino", "check_inputs"]


def by_onnx_runtime(query: Tensor, key: Tensor, value: Tensor, mask: Tensor, *, scale: float | None = None) -> Tensor:
    """Run the operator ``Attention`` of ONNX with a bool mask."""
    check_inputs(query, key, value)
    if scale == 0.0:
        raise NotImplementedError("takes no scale of 0")
    arrays = {name: x.detach().numpy() for name, x in zip("qkvm", (query, key, value, mask), strict=True)}
    return torch.from_numpy(_session(scale).run(None, arrays)[0])


def by_openvino(query: Tensor, key: Tensor, value: Tensor, mask: Tensor, *, scale: float | None = None) -> Tensor:
    """Run the operation ``ScaledDotProductAttention`` of OpenVINO with a bool mask."""
    check_inputs(query, key, value)
    factor = query.shape[3] ** -0.5 if scale is None else scale
    inputs = [x.detach().contiguous().numpy() for x in (query, key, value, mask, torch.tensor(factor))]
    return torch.from_numpy(_compiled()(inputs)[0].copy())


@cache
def _session(scale: float | None) -> Any:
    helper, proto = imported("onnx.helper"), imported("onnx").TensorProto
    kinds = [(name, proto.FLOAT) for name in "qkv"] + [("m", proto.BOOL)]
    inputs = [helper.make_tensor_value_info(name, kind, None) for name, kind in kinds]
    options = {} if scale is None else {"scale": scale}
    node = helper.make_node("Attention", list("qkvm"), ["o"], **options)
    graph = helper.make_graph([node], "attention", inputs, [helper.make_tensor_value_info("o", proto.FLOAT, None)])
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 23)], ir_version=10)
    runtime = imported("onnxruntime")
    options = runtime.SessionOptions()
    options.intra_op_num_threads = 1
    return runtime.InferenceSession(model.SerializeToString(), options, providers=["CPUExecutionProvider"])


@cache
def _compiled() -> Any:
    openvino, ops = imported("openvino"), imported("openvino.opset13")
    sides = [openvino.PartialShape([-1] * 4) for _ in range(4)]
    kinds = [*["f32"] * 3, "boolean"]
    inputs = [ops.parameter(side, getattr(openvino.Type, kind)) for side, kind in zip(sides, kinds, strict=True)]
    inputs.append(ops.parameter(openvino.PartialShape([]), openvino.Type.f32))
    out = ops.scaled_dot_product_attention(*inputs, causal=False)
    settings = {"INFERENCE_PRECISION_HINT": "f32", "INFERENCE_NUM_THREADS": 1}
    return openvino.Core().compile_model(openvino.Model([out], inputs), "CPU", settings)


def check_inputs(*tensors: Tensor) -> None:
    """Raise for what the runtimes do not take."""
    if any(x.dtype != torch.float32 for x in tensors):
        raise NotImplementedError("computes float32 alone here")
    if torch.is_grad_enabled() and any(x.requires_grad for x in tensors):
        raise NotImplementedError("has no gradients")
    if any(0 in x.shape for x in tensors):
        raise NotImplementedError("takes no empty inputs")


ONNX_RUNTIME = Library(
    "onnxruntime",
    "onnxruntime",
    (Peer("ONNX Attention", by_onnx_runtime, gqa=True, gradients=False, dtype=torch.float32),),
)
OPENVINO = Library(
    "openvino", "openvino", (Peer("ScaledDotProductAttention", by_openvino, gradients=False, dtype=torch.float32),)
)
