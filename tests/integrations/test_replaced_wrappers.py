"""replace_attention of a model in a wrapper of torch: equal results, or the reason why it cannot be replaced."""

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from tests.sampled import sampled
from torch import nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper
from torch.distributed.fsdp import FullyShardedDataParallel, fully_shard
from torch.nn import functional as F
from torch.optim.swa_utils import AveragedModel

import saccade as sc
from saccade.support.errors import UnsupportedError

pytestmark = pytest.mark.filterwarnings("ignore")
D = 16


class Calls(nn.Module):
    """Attention in a module's own code."""

    def __init__(self):
        super().__init__()
        self.qkv = nn.Linear(D, 3 * D)

    def forward(self, x):
        q, k, v = self.qkv(x).unflatten(2, (3, 2, D // 2)).permute(2, 0, 3, 1, 4)
        return F.scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(2)


def _llama():
    transformers = pytest.importorskip("transformers", reason="one of the models is of transformers")
    sizes = {"vocab_size": 9, "hidden_size": D, "num_hidden_layers": 1, "num_attention_heads": 2}
    config = transformers.LlamaConfig(**sizes, intermediate_size=24, use_cache=False)

    class OfVectors(nn.Module):
        def __init__(self):
            super().__init__()
            self.inner = transformers.LlamaModel(config)

        def forward(self, x):
            return self.inner(inputs_embeds=x).last_hidden_state

    return OfVectors()


def _encoder():
    layer = nn.TransformerEncoderLayer(D, 2, 24, dropout=0.0, batch_first=True)
    return nn.TransformerEncoder(layer, 1, enable_nested_tensor=False)


MODELS: dict[str, Callable[[], nn.Module]] = {
    "modules": _encoder,
    "calls": lambda: nn.Sequential(Calls()),
    "model": _llama,
}


def _compiled_in_place(model):
    model.compile(backend="eager")
    return model


WRAPPERS: dict[str, Callable[[nn.Module], nn.Module]] = {
    "torch.compile": lambda model: torch.compile(model, backend="eager"),
    "compiled part": lambda model: nn.Sequential(torch.compile(model, backend="eager")),
    "Module.compile": _compiled_in_place,
    "DataParallel": nn.DataParallel,
    "DistributedDataParallel": nn.parallel.DistributedDataParallel,
    "fully_shard": fully_shard,
    "FullyShardedDataParallel": lambda model: FullyShardedDataParallel(model, device_id=torch.device("cpu")),
    "checkpoint_wrapper": checkpoint_wrapper,
    "AveragedModel": AveragedModel,
}


@pytest.fixture
def group(tmp_path: Path) -> Iterator[None]:
    """Provide a process group of this process alone."""
    dist.init_process_group("gloo", init_method=f"file://{tmp_path / 'store'}", rank=0, world_size=1)
    yield
    dist.destroy_process_group()


@pytest.mark.ci
@pytest.mark.usefixtures("group")
@pytest.mark.parametrize("wrapper", WRAPPERS)
@pytest.mark.parametrize("kind", sampled(MODELS, 3))
def test_a_wrapped_model_is_replaced_with_equal_results(kind: str, wrapper: str) -> None:
    torch.compiler.reset()
    model, x = MODELS[kind]().eval(), torch.randn(2, 5, D)
    with torch.no_grad():
        expected = model(x)
        wrapped = WRAPPERS[wrapper](model)
        replaced = sc.replace_attention(wrapped)
        torch.testing.assert_close(wrapped(x), expected)
    assert [one.how for one in replaced] == ["calls" if kind == "calls" else "module"]


PROGRAMS: dict[str, Callable[[nn.Module], nn.Module]] = {
    "torch.export": lambda model: torch.export.export(model, (torch.randn(2, 5, D),)).module(),
    "torch.fx": torch.fx.symbolic_trace,
    "torch.jit.trace": lambda model: torch.jit.trace(model, (torch.randn(2, 5, D),)),
}


@pytest.mark.parametrize("kind", PROGRAMS)
def test_a_traced_program_is_refused(kind: str) -> None:
    program = PROGRAMS[kind](nn.Sequential(Calls()).eval())
    for model in (program, nn.Sequential(program, _encoder())):
        with pytest.raises(UnsupportedError, match="it is a traced program, in which attention is an operation"):
            sc.replace_attention(model)


def test_a_traced_part_without_attention_is_kept() -> None:
    parts = torch.jit.script(nn.Linear(D, D)), torch.fx.symbolic_trace(nn.Tanh()), _encoder()
    model, x = nn.Sequential(*parts).eval(), torch.randn(2, 5, D)
    expected = model(x)
    assert [one.name for one in sc.replace_attention(model)] == ["2.layers.0.self_attn"]
    torch.testing.assert_close(model(x), expected)


def test_a_replaced_model_cannot_be_scripted() -> None:
    model = _encoder().eval()
    sc.replace_attention(model)
    for one in (model, sc.nn.MultiHeadAttention(D, 2)):
        with pytest.raises(UnsupportedError, match="TorchScript"):
            torch.jit.script(one)
