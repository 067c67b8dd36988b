"""Tests of every public module with torch's tools for modules: copied, saved, made on meta, wrapped, converted."""

import copy
import importlib
import inspect
import io
import pickle
from collections.abc import Callable

import pytest
import torch
from tests.project.module_cases import (
    CASES,
    CAUSAL,
    CAUSAL_ONLY,
    GIVEN,
    MAP,
    MAPS,
    MATRICES,
    MODELS,
    PLACES,
    QKV,
    SOURCES,
    TABLE,
    TABLES,
    TOKENS,
    X,
)
from torch import Tensor, nn

from saccade import mechanisms, vision
from saccade.nn import (
    Indexer,
    from_torch,
    to_torch,
)


def _out(name: str, module: nn.Module) -> Tensor:
    """Return the output of a module for an input that is always the same."""
    if name in MATRICES:
        facts = {"mask": CAUSAL} if name in CAUSAL_ONLY else {}
        return module(*(QKV[1:] if name in ("S4D", "ShortConvolution") else QKV[:2]), **facts) @ QKV[2]
    if name in PLACES or name.startswith("Rotary"):
        return module(*(() if name in PLACES else (X[:, None],)), range(3, 8))
    plain = (TOKENS if name in MODELS else MAP if name in MAPS else TABLE if name in TABLES else X,)
    out = module(*next((given for kind, given in GIVEN.items() if name.startswith(kind)), plain))
    return out if isinstance(out, Tensor) else torch.cat(out, -1)


def _made(name: str) -> nn.Module:
    """Return a module whose parameters all differ from their initial values."""
    torch.manual_seed(0)
    module = CASES[name]().eval()
    with torch.no_grad():
        for parameter in module.parameters():
            parameter.add_(0.1 * torch.randn_like(parameter))
    return module


def test_every_public_module_is_here() -> None:
    made = {type(part) for name in CASES for part in _made(name).modules()}
    packages = ("nn", "vision", "mechanisms", "scores", "positions", "models")
    for package in (importlib.import_module(f"saccade.{name}") for name in packages):
        for name in package.__all__:
            thing = getattr(package, name)
            if inspect.isclass(thing) and issubclass(thing, nn.Module) and not inspect.isabstract(thing):
                assert thing in made or thing.__subclasses__(), f"{package.__name__}.{name} is in no case"


def _stored(module: nn.Module) -> nn.Module:
    file = io.BytesIO()
    torch.save(module, file)
    file.seek(0)
    return torch.load(file, weights_only=False)


@pytest.mark.ci
@pytest.mark.parametrize(
    "copied", [copy.deepcopy, lambda x: pickle.loads(pickle.dumps(x)), _stored], ids=["copied", "pickled", "stored"]
)
@pytest.mark.parametrize("name", CASES)
def test_a_module_can_be_copied_and_stored(name: str, copied: Callable[[nn.Module], nn.Module]) -> None:
    module = _made(name)
    expected = _out(name, module)  # what it keeps from a call must not be in the way
    assert torch.equal(_out(name, copied(module)), expected)


@pytest.mark.ci
@pytest.mark.parametrize("training", [False, True])
@pytest.mark.parametrize(
    "name", [name for name in CASES if name != "ConditionedDecoder"]
)  # it is made of a text, not of sizes
def test_a_module_that_begins_without_memory_takes_a_state(name: str, training: bool) -> None:
    module = _made(name).train(training)
    state = copy.deepcopy(module.state_dict())
    torch.manual_seed(1)
    expected = [_out(name, module).detach() for _ in range(5)]  # in training some change themselves
    for assign in (False, True):
        with torch.device("meta"):
            other = CASES[name]()
        if not assign:
            other.to_empty(device="cpu")
            with torch.no_grad():
                for x in (*other.parameters(), *other.buffers()):
                    x.fill_(77)  # memory that nobody has written to
        other.load_state_dict(copy.deepcopy(state), assign=assign)
        other.train(training)
        torch.manual_seed(1)
        for wanted in expected:
            torch.testing.assert_close(_out(name, other).detach(), wanted)


@pytest.mark.parametrize("name", CASES)
def test_a_module_that_ran_in_inference_mode_can_be_trained(name: str) -> None:
    module = CASES[name]()
    with torch.inference_mode():
        _out(name, module)
    out = _out(name, module)
    if out.requires_grad:
        out.sum().backward()
    assert out.requires_grad or not any(x.requires_grad for x in module.parameters())


class Adapter(nn.Module):
    """A wrapper as in adapters: the layer itself inside, an added factor, and no weight of its own."""

    def __init__(self, base_layer: nn.Module):
        super().__init__()
        self.base_layer = base_layer

    def forward(self, x: Tensor) -> Tensor:
        return 2 * self.base_layer(x)


def _wrapped(module: nn.Module, wrap: Callable[[nn.Module], nn.Module]) -> nn.Module:
    for name, part in module.named_children():
        if isinstance(part, nn.Linear | nn.Conv1d | nn.Conv2d):
            setattr(module, name, wrap(part))
        else:
            _wrapped(part, wrap)
    return module


class Doubled(nn.Module):
    """A wrapper that doubles the parameters of a layer and has its weight, as a layer of torch would."""

    def __init__(self, layer: nn.Module):
        super().__init__()
        with torch.no_grad():
            for x in layer.parameters():
                x.mul_(2)
        self.weight, self.layer = layer.weight, layer

    def forward(self, x: Tensor) -> Tensor:
        return self.layer(x)


@pytest.mark.parametrize("name", [*SOURCES, *TABLES, *MAPS, *MODELS])
def test_projections_may_be_wrapped(name: str) -> None:
    out = _out(name, _wrapped(_made(name), Adapter))
    torch.testing.assert_close(out, _out(name, _wrapped(_made(name), Doubled)))
    if any(isinstance(x, nn.Linear | nn.Conv1d | nn.Conv2d) for x in _made(name).modules()):
        assert not torch.equal(out, _out(name, _made(name)))


@pytest.mark.filterwarnings("ignore:torch.ao.quantization is deprecated", "ignore:torch.quantize_per_tensor")
@pytest.mark.parametrize("name", [*SOURCES, *TABLES, *MAPS, *MODELS])
def test_linear_layers_may_be_rounded(name: str) -> None:
    from torch.ao.quantization import quantize_dynamic  # noqa: PLC0415  to be removed from torch; then this test goes

    module = _made(name)
    for part in module.modules():
        if isinstance(part, Indexer):
            part.k = 99  # rounded scores select other keys
    rounded = quantize_dynamic(module, {nn.Linear}, dtype=torch.qint8)
    with torch.no_grad():
        expected = _out(name, module)
        assert (_out(name, rounded) - expected).norm() < 0.1 * expected.norm()


def test_no_state_is_made_of_layers_that_others_have_put_in() -> None:
    attention, gate = (_wrapped(_made(name), Adapter) for name in ("AttentionPool with heads", "ChannelAttention"))
    with pytest.raises(NotImplementedError, match="its query_projection is Adapter; torch's module has a plain linear"):
        to_torch(attention.attention)
    layer = _wrapped(_made("EncoderLayer"), Adapter)
    with pytest.raises(NotImplementedError, match=r"its feed_forward\.expand is Adapter; torch's layer has a plain"):
        to_torch(layer)
    theirs = nn.TransformerEncoderLayer(16, 4, 8, batch_first=True)
    theirs.linear1, theirs.self_attn.out_proj = Adapter(theirs.linear1), Adapter(theirs.self_attn.out_proj)
    with pytest.raises(NotImplementedError, match="its out_proj is Adapter; saccade's module has a plain linear layer"):
        from_torch(theirs)
    theirs.self_attn.out_proj = theirs.self_attn.out_proj.base_layer
    with pytest.raises(NotImplementedError, match="its linear1 is Adapter; saccade's layer has a plain linear layer"):
        from_torch(theirs)
    for call in (vision.to_timm, lambda module: vision.from_timm(module, {})):
        with pytest.raises(
            NotImplementedError, match=r"it has reduce\.base_layer\.weight, which " r"is not a parameter of a"
        ):
            call(gate)


def test_states_of_before_calls_were_counted_are_taken() -> None:
    performer = mechanisms.Performer(8, redraw=3)
    for _ in range(5):
        performer(*QKV[:2])
    state = performer.state_dict()
    assert sorted(state) == ["calls", "draws"]
    del state["calls"]
    other = mechanisms.Performer(8, redraw=3)
    other.load_state_dict(state)
    assert (int(other.draws), int(other.calls)) == (1, 0)
