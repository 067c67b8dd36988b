"""Every public module, built small, and the inputs with which tests call it."""

from collections.abc import Callable
from typing import Any

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
