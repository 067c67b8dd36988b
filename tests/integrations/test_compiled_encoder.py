"""A replaced ``nn.TransformerEncoder`` in compiled and exported programs: masks as torch's layers pass them."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from tests.sampled import kept
from torch import Tensor, nn
from torch._dynamo.testing import CompileCounterWithBackend
from torch.export import Dim, export

import saccade as sc

pytestmark = [pytest.mark.ci, pytest.mark.filterwarnings("ignore")]


def _later(n: int) -> Tensor:
    return torch.ones(n, n, dtype=torch.bool).triu(1)


def _padding(n: int) -> Tensor:
    return torch.arange(n) >= torch.tensor([[n], [n // 2]])


# torch's encoder turns bool masks into float masks, whose values a traced program does not know.
MASKS: dict[str, Callable[[int], dict[str, Any]]] = {
    "padding": lambda n: {"src_key_padding_mask": _padding(n)},
    "causal": lambda n: {"mask": _later(n), "is_causal": True},
    "causal and padding": lambda n: {"mask": _later(n), "src_key_padding_mask": _padding(n), "is_causal": True},
    "terms": lambda n: {"mask": torch.linspace(-1, 1, n * n).view(n, n), "is_causal": False},
}


def _encoder() -> nn.Module:
    torch.manual_seed(0)
    return nn.TransformerEncoder(nn.TransformerEncoderLayer(16, 4, 24, dropout=0.0, batch_first=True), 1)


@pytest.mark.parametrize("name", kept(MASKS, "padding"))
def test_a_compiled_encoder_equals_torch_s_at_every_length(name: str) -> None:
    torch.compiler.reset()
    theirs, ours = _encoder(), _encoder()
    sc.replace_attention(ours)
    counter = CompileCounterWithBackend("aot_eager")
    compiled = torch.compile(ours, backend=counter, fullgraph=True)
    for n in (9, 12, 10):
        x, grads = torch.randn(2, n, 16), []
        outs = [run(x, **MASKS[name](n)) for run in (compiled, theirs)]
        torch.testing.assert_close(*outs)
        for model, out in zip((ours, theirs), outs, strict=True):
            grads.append(torch.autograd.grad(out.sin().sum(), list(model.parameters())))
        torch.testing.assert_close(*grads, atol=1e-4, rtol=1e-4)
    assert counter.frame_count <= 2


class _Padded(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.encoder = _encoder().eval()

    def forward(self, x: Tensor, padding: Tensor) -> Tensor:
        out: Tensor = self.encoder(x, src_key_padding_mask=padding)
        return out


def test_an_exported_encoder_takes_any_batch_and_length() -> None:
    model = _Padded()
    x, padding = torch.randn(3, 14, 16), torch.arange(14) >= torch.tensor([[14], [6], [9]])
    expected = model(x, padding)
    sc.replace_attention(model.encoder)
    shapes = {0: Dim("batch", min=1, max=64), 1: Dim("length", min=2, max=512)}
    example = (torch.randn(2, 9, 16), _padding(9))
    program = export(model, example, dynamic_shapes=(shapes, shapes), strict=False)
    torch.testing.assert_close(program.module()(x, padding) * ~padding[..., None], expected * ~padding[..., None])
