"""Packages of models for text, speech, proteins, graphs, tables, series and recommendations."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import torch
from torch import nn

from benchmarks.code_bases.case import Make, Run, case
from benchmarks.code_bases.installed.lucidrains import ids


@case("openai-whisper", "Whisper", 6)
def whisper() -> tuple[nn.Module, Run]:
    from whisper.model import ModelDimensions, Whisper  # noqa: PLC0415

    model = Whisper(ModelDimensions(80, 16, 32, 4, 2, 50, 16, 32, 4, 2))
    return model, lambda model: model(torch.randn(2, 80, 32), ids())


@case("openai-whisper", "Whisper without SDPA", 6)
def whisper_eager() -> tuple[nn.Module, Run]:
    from whisper.model import MultiHeadAttention, disable_sdpa  # noqa: PLC0415

    def run(model: nn.Module) -> Any:
        with disable_sdpa():
            return model(torch.randn(2, 80, 32), ids())

    assert MultiHeadAttention is not None
    return whisper()[0], run


@case("fair-esm", "ESM2", 2)
def esm2() -> tuple[nn.Module, Run]:
    from esm.model.esm2 import ESM2  # noqa: PLC0415

    model = ESM2(num_layers=2, embed_dim=32, attention_heads=4)
    return model, lambda model: model(torch.randint(4, 24, (2, 12)))["logits"]


@case("fair-esm", "ESM2 with need_head_weights", 2)
def esm2_weights() -> tuple[nn.Module, Run]:
    model, _ = esm2()
    return model, lambda model: model(torch.randint(4, 24, (2, 12)), need_head_weights=True)["logits"]


@case("fair-esm", "MSATransformer", 4)
def msa() -> tuple[nn.Module, Run]:
    from esm.data import Alphabet  # noqa: PLC0415
    from esm.model.msa_transformer import MSATransformer  # noqa: PLC0415

    args = SimpleNamespace(
        embed_dim=32, dropout=0.0, ffn_embed_dim=64, attention_heads=4, attention_dropout=0.0, activation_dropout=0.0,
        max_tokens=2**14, layers=2, max_positions=64, embed_positions_msa=True, logit_bias=True, final_bias=True,
    )  # fmt: skip
    model = MSATransformer(args, Alphabet.from_architecture("msa_transformer"))
    return model, lambda model: model(torch.randint(4, 24, (2, 3, 8)))["logits"]


def _litgpt(name: str, **sizes: object) -> None:
    def make() -> tuple[nn.Module, Run]:
        from litgpt import GPT, Config  # noqa: PLC0415

        default = {"block_size": 32, "n_layer": 2, "n_embd": 32, "n_head": 4, "vocab_size": 50, "padded_vocab_size": 50}
        return GPT(Config(**default, **sizes)), lambda model: model(ids())

    case("litgpt", name, 2)(make)


_litgpt("GPT with groups", n_query_groups=2)
_litgpt("GPT with a softcap", attention_logit_softcapping=50.0)


@case("bert-pytorch", "BERT", 2)
def bert() -> tuple[nn.Module, Run]:
    from bert_pytorch.model import BERT  # noqa: PLC0415

    return BERT(50, hidden=32, n_layers=2, attn_heads=4), lambda model: model(ids(), torch.ones(2, 16).long())


def _rtdl(name: str, **options: object) -> None:
    def make() -> tuple[nn.Module, Run]:
        from rtdl_revisiting_models import FTTransformer  # noqa: PLC0415

        model = FTTransformer(
            n_cont_features=4, cat_cardinalities=[5, 3], d_out=1, n_blocks=2, d_block=32, attention_n_heads=4,
            attention_dropout=0.1, ffn_d_hidden_multiplier=2.0, ffn_dropout=0.1, residual_dropout=0.0, **options,
        )  # fmt: skip
        return model, lambda model: model(torch.randn(3, 4), torch.randint(0, 3, (3, 2)))

    case("rtdl-revisiting-models", name, 2)(make)


_rtdl("FTTransformer")
_rtdl("FTTransformer, linformer", linformer_kv_compression_ratio=0.5,
      linformer_kv_compression_sharing="headwise")  # fmt: skip


@case("rtdl", "FTTransformer", 2)
def rtdl() -> tuple[nn.Module, Run]:
    from rtdl import FTTransformer  # noqa: PLC0415

    model = FTTransformer.make_baseline(
        n_num_features=4, cat_cardinalities=[5, 3], d_token=32, n_blocks=2, attention_dropout=0.1, ffn_d_hidden=64,
        ffn_dropout=0.1, residual_dropout=0.0, d_out=1,
    )  # fmt: skip
    return model, lambda model: model(torch.randn(3, 4), torch.randint(0, 3, (3, 2)))


@case("torch-geometric", "GPSConv", 1)
def gps() -> tuple[nn.Module, Run]:
    from torch_geometric.nn import GINConv, GPSConv  # noqa: PLC0415

    model = nn.Sequential(GPSConv(32, GINConv(nn.Linear(32, 32)), heads=4))
    edges, batch = torch.tensor([[0, 1, 2, 3, 4], [1, 2, 0, 4, 5]]), torch.tensor([0, 0, 0, 1, 1, 1])
    return model, lambda model: model[0](torch.randn(6, 32), edges, batch)


@case("torch-geometric", "QFormer", 2)
def qformer() -> tuple[nn.Module, Run]:
    from torch_geometric.nn.attention import QFormer  # noqa: PLC0415

    model = nn.Sequential(QFormer(32, 64, 32, num_heads=4, num_layers=2))
    return model, lambda model: model[0](torch.randn(2, 8, 32))


@case("torch-geometric", "SetTransformerAggregation", 3)
def set_transformer() -> tuple[nn.Module, Run]:
    from torch_geometric.nn import SetTransformerAggregation  # noqa: PLC0415

    model = nn.Sequential(SetTransformerAggregation(32, num_encoder_blocks=1, num_decoder_blocks=1, heads=4))
    return model, lambda model: model[0](torch.randn(6, 32), torch.tensor([0, 0, 0, 1, 1, 1]))


@case("enformer-pytorch", "Enformer", 2, leave=("stem.*", "conv_tower.*"))
def enformer() -> tuple[nn.Module, Run]:
    from enformer_pytorch import Enformer  # noqa: PLC0415

    model = Enformer.from_hparams(
        dim=48, depth=2, heads=4, attn_dim_key=8, num_downsamples=3, target_length=-1, dim_divisible_by=4,
        output_heads={"human": 3},
    )  # fmt: skip
    return model, lambda model: model(torch.randint(0, 4, (1, 128)))


@case("iTransformer", "iTransformer", 2)
def itransformer() -> tuple[nn.Module, Run]:
    from iTransformer import iTransformer  # noqa: PLC0415

    model = iTransformer(
        num_variates=5,
        lookback_len=16,
        dim=32,
        depth=2,
        heads=4,
        dim_head=8,
        pred_length=4,
        use_reversible_instance_norm=True,
    )
    return model, lambda model: model(torch.randn(2, 16, 5))


@case("routing-transformer", "RoutingTransformerLM", 2)
def routing() -> tuple[nn.Module, Run]:
    from routing_transformer import RoutingTransformerLM  # noqa: PLC0415

    model = RoutingTransformerLM(
        num_tokens=50, dim=32, heads=4, depth=2, max_seq_len=32, window_size=8, n_local_attn_heads=4, causal=True
    )
    return model, lambda model: model(ids(32))[0]


@case("gluonts", "TemporalFusionDecoder", 1)
def gluonts_tft() -> tuple[nn.Module, Run]:
    from gluonts.torch.model.tft.layers import TemporalFusionDecoder  # noqa: PLC0415

    model = TemporalFusionDecoder(8, 4, d_hidden=32, d_var=32, num_heads=4)
    return model, lambda model: model(torch.randn(2, 12, 32), torch.randn(2, 1, 32), torch.ones(2, 8))


@case("pytorch-forecasting", "InterpretableMultiHeadAttention", 4)
def forecasting() -> tuple[nn.Module, Run]:
    from pytorch_forecasting.models.temporal_fusion_transformer.sub_modules import (  # noqa: PLC0415
        InterpretableMultiHeadAttention,
    )

    model = nn.Sequential(InterpretableMultiHeadAttention(n_head=4, d_model=32))
    mask = torch.ones(2, 8, 8).triu(1).bool()

    def run(model: Any) -> Any:
        x = torch.randn(2, 8, 32)
        return model[0](x, x, x, mask)[0]

    return model, run


@case("perceiver-io", "PerceiverEncoder's attention", 3)
def perceiver_io() -> tuple[nn.Module, Run]:
    from perceiver.model.core.modules import CrossAttentionLayer, SelfAttentionBlock  # noqa: PLC0415

    model = nn.ModuleList([CrossAttentionLayer(4, 32, 32), SelfAttentionBlock(2, 4, 32)])

    def run(model: Any) -> Any:
        return model[1](model[0](torch.randn(2, 5, 32), torch.randn(2, 16, 32)))

    return model, run


def _transformers(name: str, attentions: int, config: str, **options: object) -> None:
    def make() -> tuple[nn.Module, Run]:
        import transformers  # noqa: PLC0415

        model = getattr(transformers, name)(getattr(transformers, config)(**options))
        model.set_attn_implementation("eager")
        return model, lambda model: model(input_ids=ids()).last_hidden_state

    case("transformers", f"{name}, eager", attentions)(make)


_GPT = {"vocab_size": 50, "n_embd": 32, "n_layer": 2, "n_head": 4, "n_positions": 32}
_transformers("GPT2Model", 2, "GPT2Config", **_GPT)
_transformers("BloomModel", 2, "BloomConfig", vocab_size=50, hidden_size=32, n_layer=2, n_head=4)
_transformers("T5EncoderModel", 2, "T5Config", vocab_size=50, d_model=32, d_kv=8, num_heads=4, num_layers=2, d_ff=64)
_transformers("FunnelModel", 2, "FunnelConfig", vocab_size=50, d_model=32, n_head=4, d_head=8, d_inner=64,
              block_sizes=[1], num_decoder_layers=1)  # fmt: skip


def _torch(name: str, attentions: int, make: Make) -> None:
    case("torch", name, attentions)(make)


def _torch_encoder() -> tuple[nn.Module, Run]:
    layer = nn.TransformerEncoderLayer(32, 4, 64, batch_first=True)
    model = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)
    padding = torch.arange(16)[None] >= torch.tensor([[16], [11]])
    return model, lambda model: model(torch.randn(2, 16, 32), src_key_padding_mask=padding)


def _torch_both() -> tuple[nn.Module, Run]:
    model = nn.Transformer(32, 4, 1, 1, 64, batch_first=True)
    mask = nn.Transformer.generate_square_subsequent_mask(8)
    return model, lambda model: model(torch.randn(2, 16, 32), torch.randn(2, 8, 32), tgt_mask=mask)


_torch("nn.TransformerEncoder", 2, _torch_encoder)
_torch("nn.Transformer", 3, _torch_both)


@case("tabicl", "TabICL's encoder", 2)
def tabicl() -> tuple[nn.Module, Run]:
    from tabicl._model.encoders import Encoder  # noqa: PLC0415

    model = Encoder(num_blocks=2, d_model=32, nhead=4, dim_feedforward=64)
    return model, lambda model: model(torch.randn(2, 16, 32))


@case("sentence-transformers", "BertModel with mean pooling", 2)
def sentences() -> tuple[nn.Module, Run]:
    from sentence_transformers.models import Pooling  # noqa: PLC0415
    from transformers import BertConfig, BertModel  # noqa: PLC0415

    config = BertConfig(vocab_size=50, hidden_size=32, num_hidden_layers=2, num_attention_heads=4, intermediate_size=64)
    model = nn.ModuleDict({"bert": BertModel(config), "pooling": Pooling(32)})
    mask = (torch.arange(16)[None] < torch.tensor([[16], [11]])).long()

    def run(model: Any) -> Any:
        tokens = model["bert"](ids(), attention_mask=mask).last_hidden_state
        return model["pooling"]({"token_embeddings": tokens, "attention_mask": mask})["sentence_embedding"]

    return model, run
