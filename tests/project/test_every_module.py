"""Tests of every public module with torch's tools for modules: copied, saved, made on meta, wrapped, converted."""

import copy
import importlib
import inspect
import io
import pickle
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from saccade import masks, mechanisms, models, positions, scorers, scores, vision
from saccade.nn import (
    AttentionBlock,
    AttentionPool,
    ColumnAttention,
    CompressedAttention,
    DecoderLayer,
    DecoderStack,
    DifferentialAttention,
    EncoderLayer,
    EncoderStack,
    FeedForward,
    ForgettingAttention,
    Indexer,
    LatentAttention,
    MixtureOfExperts,
    MultiHeadAttention,
    NativeSparseAttention,
    Recurrence,
    RowAttention,
    SharedKeyAttention,
    StateSpace,
    TriangleAttention,
    from_torch,
    to_torch,
)


class _Fading(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.slope = nn.Parameter(torch.ones(()))

    def forward(self, score: torch.Tensor, *place: torch.Tensor) -> torch.Tensor:
        return score - self.slope * (place[2] - place[3]).abs()


CAUSAL = masks.Causal()
SIZES: dict[str, Any] = {"vocab_size": 9, "max_len": 16, "embed_dim": 16, "num_heads": 2, "feed_forward_dim": 8}
WRITER = {**SIZES, "num_encoder_layers": 1, "num_decoder_layers": 1}
TOKENS = torch.tensor([[1, 2, 3, 4], [5, 6, 7, 8]])
Makes = dict[str, Callable[[], nn.Module]]
SOURCES: Makes = {
    "MultiHeadAttention": lambda: MultiHeadAttention(16, 4, num_kv_heads=2, mask=CAUSAL, rotary=positions.Rotary(4)),
    "MultiHeadAttention with a gate": lambda: MultiHeadAttention(16, 4, mask=CAUSAL, output_gate=True),
    "LatentAttention": lambda: LatentAttention(
        16, 4, latent_dim=6, head_dim=6, rotary_dim=2, query_latent_dim=5, rotary=positions.Rotary(2), mask=CAUSAL
    ),
    "LatentAttention with an indexer": lambda: LatentAttention(
        16, 4, latent_dim=6, head_dim=6, rotary_dim=2, mask=CAUSAL, indexer=Indexer(16, 3, num_heads=2, head_dim=4)
    ),
    "DifferentialAttention": lambda: DifferentialAttention(16, 2, mask=CAUSAL, rotary=positions.Rotary(4)),
    "NativeSparseAttention": lambda: NativeSparseAttention(
        16, 4, num_kv_heads=2, mechanism=mechanisms.NativeSparse(2, 2, 2), rotary=positions.Rotary(4)
    ),
    "CompressedAttention": lambda: CompressedAttention(
        16, 4, head_dim=6, rotary_dim=2, block_size=2, window=3, rotary=positions.Rotary(2)
    ),
    "CompressedAttention with an indexer": lambda: CompressedAttention(
        16,
        4,
        head_dim=6,
        rotary_dim=2,
        block_size=2,
        window=2,
        overlap=True,
        k=1,
        index_heads=3,
        index_dim=4,
        query_latent_dim=5,
        output_groups=2,
        output_latent_dim=3,
    ),
    "ForgettingAttention": lambda: ForgettingAttention(16, 4, num_kv_heads=2),
    "AttentionBlock": lambda: AttentionBlock(16, 4, mask=CAUSAL),
    "AttentionPool": lambda: AttentionPool(16),
    "AttentionPool with heads": lambda: AttentionPool(16, num_heads=4, num_queries=2),
    "FeedForward": lambda: FeedForward(16, 8, gated=True, activation="gelu_tanh"),
    "StateSpace": lambda: StateSpace(16, 4),
    "Recurrence": lambda: Recurrence(16, 4, decay="channel"),
    "Recurrence of DeltaProduct": lambda: Recurrence(16, 4, mechanisms.DeltaProduct(2), decay="token"),
    "Recurrence of Mesa": lambda: Recurrence(16, 4, mechanisms.Mesa(torch.nn.Parameter(torch.ones(4, 4)))),
    "Recurrence of GatedDelta2": lambda: Recurrence(16, 2, mechanisms.GatedDelta2(), decay="channel"),
    "Recurrence of Mamba3": lambda: Recurrence(16, 4, mechanisms.Mamba3()),
    "Recurrence of RWKV7": lambda: Recurrence(16, 4, mechanisms.RWKV7()),
    "Recurrence of SSD": lambda: Recurrence(16, 4, mechanisms.SSD(4)),
    "MixtureOfExperts": lambda: MixtureOfExperts(16, 8, 3),
    "EncoderLayer": lambda: EncoderLayer(MultiHeadAttention(16, 4), FeedForward(16, 8), norm="rms"),
    "DecoderLayer": lambda: DecoderLayer(MultiHeadAttention(16, 4, mask=CAUSAL), FeedForward(16, 8)),
    "SignalEncoder": lambda: models.SignalEncoder(16, 8, 2, 1, mask=masks.sliding_window(2)),
    "EncoderStack": lambda: EncoderStack([EncoderLayer(MultiHeadAttention(16, 4), FeedForward(16, 8))]),
    "DecoderStack with shared keys": lambda: DecoderStack(
        [
            DecoderLayer(one, FeedForward(16, 8))
            for one in (MultiHeadAttention(16, 4, mask=CAUSAL), SharedKeyAttention(16, 4, 0, mask=CAUSAL))
        ]
    ),
    "DecoderStack with a shared selection": lambda: DecoderStack(
        [
            DecoderLayer(LatentAttention(16, 4, latent_dim=6, head_dim=6, rotary_dim=2, mask=CAUSAL, **own), one)
            for own, one in (
                ({"indexer": Indexer(16, 3, num_heads=2, head_dim=4)}, FeedForward(16, 8)),
                ({"selection_from": 0}, FeedForward(16, 8)),
            )
        ]
    ),
    "DecoderStack with a value residual": lambda: DecoderStack(
        [DecoderLayer(MultiHeadAttention(16, 4, mask=CAUSAL), FeedForward(16, 8)) for _ in range(2)],
        value_residual=True,
    ),
    "DecoderStack": lambda: DecoderStack([DecoderLayer(MultiHeadAttention(16, 4, mask=CAUSAL), FeedForward(16, 8))]),
}
TABLES: Makes = {
    "RowAttention": lambda: RowAttention(16, 4),
    "ColumnAttention": lambda: ColumnAttention(16, 4),
    "TriangleAttention": lambda: TriangleAttention(16, 4),
    "TriangleAttention around the end": lambda: TriangleAttention(16, 4, "end"),
}
MAPS: Makes = {
    "ChannelAttention": lambda: vision.ChannelAttention(16, 4),
    "ECA": lambda: vision.ECA(16),
    "SpatialAttention": lambda: vision.SpatialAttention(3),
    "PositionAttention": lambda: vision.PositionAttention(16, 4),
    "CBAM": lambda: vision.CBAM(16, 4),
    "BAM": lambda: vision.BAM(16, 4),
    "NonLocal": lambda: vision.NonLocal(16),
}
MATRICES: Makes = {
    "Softmax": lambda: mechanisms.Softmax(sink_logit=4),
    "Linear": mechanisms.Linear,
    "Linear of squares": lambda: mechanisms.Linear("squared_relu"),
    "Linear of positive parts": lambda: mechanisms.Linear("relu"),
    "Performer": lambda: mechanisms.Performer(8, redraw=3),
    "Performer with directions": lambda: mechanisms.Performer(directions=torch.randn(8, 4)),
    "Differential": lambda: mechanisms.Differential(2),
    "Forgetting": lambda: mechanisms.Forgetting(3),
    "Linformer": lambda: mechanisms.Linformer(7, 3),
    "GatedLinear": lambda: mechanisms.GatedLinear.retnet(2),
    "Delta": mechanisms.Delta,
    "GatedDelta2": mechanisms.GatedDelta2,
    "DeltaProduct": lambda: mechanisms.DeltaProduct(1),
    "RWKV7": mechanisms.RWKV7,
    "Mesa": mechanisms.Mesa,
    "PaTH": lambda: mechanisms.PaTH(1),  # keys of four channels: the key, a vector, a strength and a forget gate
    "SSD": lambda: mechanisms.SSD(2),
    "Mamba3": mechanisms.Mamba3,
    "S4D": lambda: mechanisms.S4D(2, 4),
    "ShortConvolution": lambda: mechanisms.ShortConvolution(2, 3),
    "CompressiveMemory": lambda: mechanisms.CompressiveMemory(4, 3, update="delta", rotary=positions.Rotary(4)),
    "Nystrom": lambda: mechanisms.Nystrom(3),
    "TopK": lambda: mechanisms.TopK(scorers.DotProducts(), 3),
    "NativeSparse": lambda: mechanisms.NativeSparse(2, 2, 2),
    "Dot": lambda: mechanisms.Softmax(score=scores.Dot()),
    "Cosine": lambda: mechanisms.Softmax(score=scores.Cosine()),
    "Modified": lambda: mechanisms.Softmax(score=scores.Modified(_Fading())),
    "Gaussian": lambda: mechanisms.Softmax(score=scores.Gaussian(2.0)),
    "Bilinear": lambda: mechanisms.Softmax(score=scores.Bilinear(4, 4)),
    "Additive": lambda: mechanisms.Softmax(score=scores.Additive(4, 4, 5)),
    "ALiBi": lambda: mechanisms.Softmax(bias=positions.ALiBi(4)),
    "Clipped": lambda: mechanisms.Softmax(bias=positions.Clipped(4, 3)),
    "T5": lambda: mechanisms.Softmax(bias=positions.T5(4)),
    "ShawKeys of heads": lambda: mechanisms.Softmax(bias=positions.ShawKeys(4, 3, num_heads=4)),
    "ShawKeys": lambda: mechanisms.Softmax(bias=positions.ShawKeys(4, 3)),
    "GridTable": lambda: mechanisms.Softmax(bias=positions.GridTable(4, 1, 7)),
}
PLACES: Makes = {"Sinusoidal": lambda: positions.Sinusoidal(16), "Learned": lambda: positions.Learned(16, 16)}
PICTURE: dict[str, Any] = {"image_size": (4, 6), "patch_size": 2, "num_layers": 1, "channels": 16}
PICTURE |= {name: SIZES[name] for name in ("embed_dim", "num_heads", "feed_forward_dim")}
FINDER = {**WRITER, "channels": 16, "num_classes": 3, "num_queries": 4}
FINDER = {name: size for name, size in FINDER.items() if name not in ("vocab_size", "max_len")}


def _seer(**changes: Any) -> models.VisionTransformer:
    return models.VisionTransformer(models.VisionTransformerConfig(**PICTURE, **changes))


MODELS: Makes = {
    "Encoder": lambda: models.Encoder(models.EncoderConfig(**SIZES, num_layers=1)),
    "Decoder": lambda: models.Decoder(models.DecoderConfig(**SIZES, num_layers=1)),
    "Decoder of notes": lambda: models.Decoder(
        models.DecoderConfig(**SIZES, num_layers=1, position_encoding="relative")
    ),
    "Decoder untied": lambda: models.Decoder(
        models.DecoderConfig(**SIZES, num_layers=1, position_encoding="learned", tied=False)
    ),
    "EncoderDecoder": lambda: models.EncoderDecoder(models.EncoderDecoderConfig(**WRITER)),
    "EncoderDecoder of waves": lambda: models.EncoderDecoder(
        models.EncoderDecoderConfig(**WRITER, position_encoding="sinusoidal")
    ),
    "VisionTransformer": lambda: _seer(num_classes=5),
    "VisionTransformer of waves": lambda: _seer(
        position_encoding="sinusoidal", pooling="mean", embedding_norm=True, activation="quick_gelu"
    ),
    "DualEncoder": lambda: models.DualEncoder(
        _seer(), models.Decoder(models.DecoderConfig(**SIZES, num_layers=1)), embed_dim=8
    ),
    "SetDecoder": lambda: models.SetDecoder(models.SetDecoderConfig(**FINDER)),
    "SetDecoder with a backbone": lambda: models.SetDecoder(models.SetDecoderConfig(**FINDER), nn.Conv2d(16, 16, 1)),
    "ConditionedDecoder": lambda: torch.no_grad()(
        models.EncoderDecoder(models.EncoderDecoderConfig(**WRITER)).eval().given
    )(TOKENS),
}
CASES: Makes = {
    **SOURCES,
    **TABLES,
    **MAPS,
    **MATRICES,
    **PLACES,
    **MODELS,
    "Rotary": lambda: positions.Rotary(16, scaling=positions.YaRN(2.0, trained_len=9)),
    "RelationTable": lambda: positions.RelationTable(4, 9),
    "RotaryTables": lambda: positions.RotaryTables(*positions.Rotary(16).tables(range(9))),
}
CAUSAL_ONLY = (
    "Forgetting",
    "GatedLinear",
    "Delta",
    "GatedDelta2",
    "DeltaProduct",
    "RWKV7",
    "Mesa",
    "PaTH",
    "SSD",
    "Mamba3",
    "S4D",
    "CompressiveMemory",
    "NativeSparse",
)
QKV = [torch.randn(2, heads, 7, 4, generator=torch.Generator().manual_seed(1)) for heads in (4, 2, 2)]
X = torch.randn(2, 5, 16, generator=torch.Generator().manual_seed(2))
TABLE = torch.randn(2, 5, 5, 16, generator=torch.Generator().manual_seed(4))
MAP = torch.randn(2, 16, 4, 5, generator=torch.Generator().manual_seed(3))
IMAGES = torch.randn(2, 16, 4, 6, generator=torch.Generator().manual_seed(4))
GIVEN: dict[str, tuple[Tensor, ...]] = {
    "EncoderDecoder": (TOKENS, TOKENS),
    "VisionTransformer": (IMAGES,),
    "DualEncoder": (IMAGES, TOKENS),
    "SetDecoder": (MAP,),
    "RelationTable": (TOKENS[:, None],),
}


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
