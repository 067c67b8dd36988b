"""Packages that write attention with einops and einsum."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from benchmarks.code_bases.case import Run, case


def images(side: int = 32, channels: int = 3) -> Tensor:
    """Return two random images."""
    return torch.randn(2, channels, side, side)


def ids(length: int = 16, vocabulary: int = 50) -> Tensor:
    """Return two random texts."""
    return torch.randint(1, vocabulary, (2, length))


def _vit(kind: str, attentions: int, module: str = "", equation: str = "", **sizes: object) -> None:
    default = {"image_size": 32, "patch_size": 8, "num_classes": 5, "dim": 32, "depth": 2, "heads": 4, "mlp_dim": 64}

    def make() -> tuple[nn.Module, Run]:
        import importlib  # noqa: PLC0415

        model = getattr(importlib.import_module(f"vit_pytorch.{module}" if module else "vit_pytorch"), kind)
        options = {name: size for name, size in (default | sizes).items() if size is not None}
        return model(**options), lambda model: model(images())

    case("vit-pytorch", kind if module in ("", "simple_vit") else f"{module}.{kind}", attentions, equation=equation)(
        make
    )


_vit("ViT", 2)
_vit("SimpleViT", 2)
_VALUES = "b h i j, b h j d -> b h i d"  # the product that the weights enter after their heads are mixed
_vit("DeepViT", 2, "deepvit", _VALUES)
_vit("CaiT", 3, "cait", _VALUES, cls_depth=1)
_vit("ViT", 2, "vit_for_small_dataset")
_vit("ViT", 4, "parallel_vit", num_parallel_branches=2)
_vit("ViT", 2, "learnable_memory_vit")
_vit("SimpleViT", 2, "simple_vit_with_register_tokens")
_vit("SimpleViT", 2, "simple_vit_with_qk_norm")
_vit("PiT", 3, "pit", depth=(1, 2), mlp_dim=64)
_vit("RvT", 2, "rvt")


@case("x-transformers", "Decoder", 2)
def x_decoder() -> tuple[nn.Module, Run]:
    from x_transformers import Decoder, TransformerWrapper  # noqa: PLC0415

    model = TransformerWrapper(num_tokens=50, max_seq_len=32, attn_layers=Decoder(dim=32, depth=2, heads=4))
    return model, lambda model: model(ids())


@case("x-transformers", "Decoder, rotary, one key head, flash", 2)
def x_flash() -> tuple[nn.Module, Run]:
    from x_transformers import Decoder, TransformerWrapper  # noqa: PLC0415

    layers = Decoder(dim=32, depth=2, heads=4, rotary_pos_emb=True, attn_one_kv_head=True, attn_flash=True)
    return TransformerWrapper(num_tokens=50, max_seq_len=32, attn_layers=layers), lambda model: model(ids())


@case("x-transformers", "Encoder, T5 bias, cosine similarity", 2)
def x_encoder() -> tuple[nn.Module, Run]:
    from x_transformers import Encoder, TransformerWrapper  # noqa: PLC0415

    layers = Encoder(dim=32, depth=2, heads=4, rel_pos_bias=True, attn_qk_norm=True)
    model = TransformerWrapper(num_tokens=50, max_seq_len=32, attn_layers=layers)
    return model, lambda model: model(ids(), mask=torch.arange(16)[None] < torch.tensor([[16], [11]]))


@case("x-transformers", "XTransformer", 6)
def x_both() -> tuple[nn.Module, Run]:
    from x_transformers import XTransformer  # noqa: PLC0415

    model = XTransformer(
        dim=32, enc_num_tokens=50, enc_depth=2, enc_heads=4, enc_max_seq_len=16, dec_num_tokens=50, dec_depth=2,
        dec_heads=4, dec_max_seq_len=16,
    )  # fmt: skip
    return model, lambda model: model(ids(), ids())


@case("perceiver-pytorch", "Perceiver", 4)
def perceiver() -> tuple[nn.Module, Run]:
    from perceiver_pytorch import Perceiver  # noqa: PLC0415

    model = Perceiver(
        input_channels=3, input_axis=2, num_freq_bands=2, max_freq=4.0, depth=2, num_latents=6, latent_dim=32,
        cross_heads=1, latent_heads=4, cross_dim_head=16, latent_dim_head=8, num_classes=5,
    )  # fmt: skip
    return model, lambda model: model(images(8).permute(0, 2, 3, 1))


@case("linformer", "LinformerLM", 2)
def linformer() -> tuple[nn.Module, Run]:
    from linformer import LinformerLM  # noqa: PLC0415

    model = LinformerLM(num_tokens=50, dim=32, seq_len=16, depth=2, heads=4, k=8)
    return model, lambda model: model(ids())


@case("local-attention", "LocalTransformer", 2)
def local() -> tuple[nn.Module, Run]:
    from local_attention import LocalTransformer  # noqa: PLC0415

    model = LocalTransformer(num_tokens=50, dim=32, depth=2, max_seq_len=32, local_attn_window_size=8, heads=4)
    return model, lambda model: model(ids())


@case("tab-transformer-pytorch", "FTTransformer", 2)
def ft() -> tuple[nn.Module, Run]:
    from tab_transformer_pytorch import FTTransformer  # noqa: PLC0415

    model = FTTransformer(categories=(5, 4, 3), num_continuous=4, dim=32, dim_out=1, depth=2, heads=4)
    return model, lambda model: model(torch.randint(0, 3, (2, 3)), torch.randn(2, 4))


@case("conformer", "Conformer", 2)
def conformer() -> tuple[nn.Module, Run]:
    from conformer import Conformer  # noqa: PLC0415

    return Conformer(dim=32, depth=2, dim_head=8, heads=4), lambda model: model(torch.randn(2, 16, 32))


@case("axial-attention", "AxialAttention", 2)
def axial() -> tuple[nn.Module, Run]:
    from axial_attention import AxialAttention  # noqa: PLC0415

    return AxialAttention(dim=32, dim_index=1, heads=4, num_dimensions=2), lambda model: model(images(4, 32))


@case("bottleneck-transformer-pytorch", "BottleStack", 2)
def bottleneck() -> tuple[nn.Module, Run]:
    from bottleneck_transformer_pytorch import BottleStack  # noqa: PLC0415

    model = BottleStack(dim=16, fmap_size=8, dim_out=32, num_layers=2, heads=4, dim_head=8, rel_pos_emb=True)
    return model, lambda model: model(images(8, 16))


@case("halonet-pytorch", "HaloAttention", 1)
def halo() -> tuple[nn.Module, Run]:
    from halonet_pytorch import HaloAttention  # noqa: PLC0415

    model = nn.Sequential(HaloAttention(dim=32, block_size=4, halo_size=2, dim_head=8, heads=4))
    return model, lambda model: model(images(8, 32))


@case("timesformer-pytorch", "TimeSformer", 8)
def timesformer() -> tuple[nn.Module, Run]:
    from timesformer_pytorch import TimeSformer  # noqa: PLC0415

    model = TimeSformer(dim=32, image_size=16, patch_size=8, num_frames=4, num_classes=5, depth=2, heads=4, dim_head=8)
    return model, lambda model: model(torch.randn(2, 4, 3, 16, 16))


@case("stam-pytorch", "STAM", 3)
def stam() -> tuple[nn.Module, Run]:
    from stam_pytorch import STAM  # noqa: PLC0415

    model = STAM(
        dim=32, image_size=16, patch_size=8, num_frames=3, space_depth=2, space_heads=4, space_mlp_dim=64,
        time_depth=1, time_heads=4, time_mlp_dim=64, num_classes=5,
    )  # fmt: skip
    return model, lambda model: model(torch.randn(2, 3, 3, 16, 16))


@case("graph-transformer-pytorch", "GraphTransformer", 2)
def graph() -> tuple[nn.Module, Run]:
    from graph_transformer_pytorch import GraphTransformer  # noqa: PLC0415

    model = GraphTransformer(dim=32, depth=2, edge_dim=8, with_feedforwards=True, heads=4, dim_head=8)
    return model, lambda model: model(torch.randn(2, 6, 32), torch.randn(2, 6, 6, 8), mask=torch.ones(2, 6).bool())


@case("recurrent-memory-transformer-pytorch", "RecurrentMemoryTransformer", 2)
def rmt() -> tuple[nn.Module, Run]:
    from recurrent_memory_transformer_pytorch import RecurrentMemoryTransformer  # noqa: PLC0415

    model = RecurrentMemoryTransformer(dim=32, num_tokens=50, num_memory_tokens=4, depth=2, seq_len=16, heads=4)
    return model, lambda model: model(ids())


@case("block-recurrent-transformer-pytorch", "BlockRecurrentTransformer", 2)
def block_recurrent() -> tuple[nn.Module, Run]:
    from block_recurrent_transformer_pytorch import BlockRecurrentTransformer  # noqa: PLC0415

    model = BlockRecurrentTransformer(
        num_tokens=50, dim=32, depth=2, dim_head=8, heads=4, max_seq_len=32, block_width=16, num_state_vectors=4,
        recurrent_layers=(),
    )  # fmt: skip
    return model, lambda model: model(ids())


@case("x-clip", "CLIP", 4)
def x_clip() -> tuple[nn.Module, Run]:
    from x_clip import CLIP  # noqa: PLC0415

    model = CLIP(
        dim_text=32, dim_image=32, dim_latent=32, num_text_tokens=50, text_enc_depth=2, text_seq_len=16,
        text_heads=4, visual_enc_depth=2, visual_image_size=32, visual_patch_size=8, visual_heads=4,
    )  # fmt: skip
    return model, lambda model: model(ids(), images())


@case("denoising-diffusion-pytorch", "Unet", 5)
def unet() -> tuple[nn.Module, Run]:
    from denoising_diffusion_pytorch import Unet  # noqa: PLC0415

    model = Unet(dim=16, dim_mults=(1, 2), full_attn=(True, True), flash_attn=False, attn_heads=4, attn_dim_head=8)
    return model, lambda model: model(images(8), torch.tensor([3, 7]))


@case("denoising-diffusion-pytorch", "Unet with flash attention", 5)
def unet_flash() -> tuple[nn.Module, Run]:
    from denoising_diffusion_pytorch import Unet  # noqa: PLC0415

    model = Unet(dim=16, dim_mults=(1, 2), full_attn=(True, True), flash_attn=True, attn_heads=4, attn_dim_head=8)
    return model, lambda model: model(images(8), torch.tensor([3, 7]))


@case("memory-efficient-attention-pytorch", "Attention", 1)
def memory_efficient() -> tuple[nn.Module, Run]:
    from memory_efficient_attention_pytorch import Attention  # noqa: PLC0415

    model = nn.Sequential(Attention(dim=32, dim_head=8, heads=4, causal=True))
    return model, lambda model: model(torch.randn(2, 16, 32))


@case("nystrom-attention", "Nystromformer", 6)
def nystrom() -> tuple[nn.Module, Run]:
    from nystrom_attention import Nystromformer  # noqa: PLC0415

    model = Nystromformer(dim=32, dim_head=8, heads=4, depth=2, num_landmarks=4, pinv_iterations=2)
    return model, lambda model: model(torch.randn(2, 16, 32))


@case("en-transformer", "EnTransformer", 4, order=(0, 2, 1))
def en() -> tuple[nn.Module, Run]:
    from en_transformer import EnTransformer  # noqa: PLC0415

    model = EnTransformer(dim=32, depth=2, num_tokens=21, dim_head=32, heads=4, neighbors=0)
    return model, lambda model: model(ids(8, 20), torch.randn(2, 8, 3))


@case("point-transformer-pytorch", "PointTransformerLayer", 1)
def point() -> tuple[nn.Module, Run]:
    from point_transformer_pytorch import MultiheadPointTransformerLayer  # noqa: PLC0415

    model = MultiheadPointTransformerLayer(dim=32, heads=4, dim_head=8)
    return model, lambda model: model(torch.randn(2, 8, 32), torch.randn(2, 8, 3))


@case("coca-pytorch", "CoCa", 6)
def coca() -> tuple[nn.Module, Run]:
    from coca_pytorch.coca_pytorch import CoCa  # noqa: PLC0415
    from vit_pytorch import SimpleViT  # noqa: PLC0415
    from vit_pytorch.extractor import Extractor  # noqa: PLC0415

    vit = SimpleViT(image_size=32, patch_size=8, num_classes=5, dim=32, depth=2, heads=4, mlp_dim=64)
    model = CoCa(
        dim=32, img_encoder=Extractor(vit, return_embeddings_only=True, detach=False), image_dim=32, num_tokens=50,
        unimodal_depth=1, multimodal_depth=1, dim_head=8, heads=4, caption_loss_weight=1.0,
    )  # fmt: skip
    return model, lambda model: model(ids(), images(), return_loss=True)
