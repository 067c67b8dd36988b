"""Packages of models for images, and for images with texts."""

from __future__ import annotations

import torch
from torch import nn

from benchmarks.code_bases.case import Run, case
from benchmarks.code_bases.installed.lucidrains import ids, images


def _timm(name: str, attentions: int, side: int = 32, entering: tuple[str, ...] = (), **options: object) -> None:
    def make() -> tuple[nn.Module, Run]:
        import timm  # noqa: PLC0415

        return timm.create_model(name, pretrained=False, num_classes=5, **options), lambda model: model(images(side))

    case("timm", name, attentions, entering=entering)(make)


_SMALL = {"img_size": 32, "patch_size": 8, "embed_dim": 32, "depth": 2, "num_heads": 4}
_timm("vit_tiny_patch16_224", 2, **_SMALL)
_timm("deit3_small_patch16_224", 2, **_SMALL)
_timm("vit_relpos_small_patch16_224", 2, **_SMALL)
_timm("beit_base_patch16_224", 2, **_SMALL)
_timm("eva02_tiny_patch14_224", 2, **_SMALL)
_timm("cait_xxs24_224", 4, entering=("blocks.*.attn.attn_drop",), **_SMALL)
_timm("xcit_nano_12_p8_224", 4, **_SMALL)
_timm("swin_tiny_patch4_window7_224", 4, 56, img_size=56, embed_dim=16, depths=(2, 2), num_heads=(2, 4))
_timm("swinv2_tiny_window8_256", 4, 64, img_size=64, embed_dim=16, depths=(2, 2), num_heads=(2, 4))
_timm("maxvit_nano_rw_256", 14, 64, img_size=64)
_timm("levit_128s", 11, 224)
_timm("convit_tiny", 12, 32, entering=("*.attn_drop",), img_size=32, patch_size=8, embed_dim=8)
_timm("pvt_v2_b0", 8, 64)
_timm("twins_svt_small", 18, 64, img_size=64)
_timm("volo_d1_224", 20, 64, img_size=64)
_timm("mobilevit_xxs", 9, 64)
_timm("edgenext_xx_small", 3, 64)
_timm("gcvit_xxtiny", 12, 224)
_timm("nest_tiny", 12, 224)


def _torchvision(name: str, attentions: int, side: int, model: object) -> None:
    def make() -> tuple[nn.Module, Run]:
        from torchvision import models  # noqa: PLC0415

        return model(models), lambda model: model(images(side))  # type: ignore[operator]

    case("torchvision", name, attentions)(make)


_torchvision(
    "VisionTransformer", 2, 32,
    lambda m: m.VisionTransformer(32, 8, num_layers=2, num_heads=4, hidden_dim=32, mlp_dim=64, num_classes=5),
)  # fmt: skip
_torchvision(
    "SwinTransformer", 4, 32,
    lambda m: m.SwinTransformer([2, 2], 16, [2, 2], [2, 4], window_size=[4, 4], num_classes=5),
)  # fmt: skip
_torchvision(
    "SwinTransformer v2", 4, 32,
    lambda m: m.SwinTransformer(
        [2, 2], 16, [2, 2], [2, 4], window_size=[4, 4], num_classes=5,
        block=m.swin_transformer.SwinTransformerBlockV2, downsample_layer=m.swin_transformer.PatchMergingV2,
    ),
)  # fmt: skip
_torchvision(
    "MaxVit", 4, 64,
    lambda m: m.MaxVit((64, 64), 16, 2, [16, 32], [1, 1], 8, 0.0, num_classes=5),
)  # fmt: skip


@case("open-clip-torch", "CLIP", 4)
def open_clip() -> tuple[nn.Module, Run]:
    from open_clip.model import CLIP, CLIPTextCfg, CLIPVisionCfg  # noqa: PLC0415

    vision = CLIPVisionCfg(layers=2, width=32, head_width=8, patch_size=8, image_size=32)
    model = CLIP(32, vision, CLIPTextCfg(context_length=16, vocab_size=50, width=32, heads=4, layers=2))
    return model, lambda model: model(images(), ids())


@case("open-clip-torch", "CoCa", 9)
def open_coca() -> tuple[nn.Module, Run]:
    from open_clip import CoCa  # noqa: PLC0415

    vision = {
        "layers": 2,
        "width": 32,
        "head_width": 8,
        "patch_size": 8,
        "image_size": 32,
        "attentional_pool": True,
        "attn_pooler_heads": 4,
        "output_tokens": True,
    }
    text = {
        "context_length": 16,
        "vocab_size": 50,
        "width": 32,
        "heads": 4,
        "layers": 2,
        "embed_cls": True,
        "output_tokens": True,
    }
    decoder = {"context_length": 16, "vocab_size": 50, "width": 32, "heads": 4, "layers": 2}
    model = CoCa(32, decoder, text, vision)
    return model, lambda model: model(images(), ids(16))


@case("clip-anytorch", "CLIP", 5)
def clip() -> tuple[nn.Module, Run]:
    from clip.model import CLIP  # noqa: PLC0415

    model = CLIP(32, 32, (1, 1, 1, 1), 16, None, 16, 50, 64, 1, 4)
    return model, lambda model: (model.encode_image(images()), model.encode_text(ids()))


@case("segment-anything", "Sam", 9)
def sam() -> tuple[nn.Module, Run]:
    from segment_anything.modeling import ImageEncoderViT, MaskDecoder, PromptEncoder, TwoWayTransformer  # noqa: PLC0415

    class Model(nn.Module):
        """The three parts, as `Sam` calls them."""

        def __init__(self) -> None:
            super().__init__()
            self.image_encoder = ImageEncoderViT(
                img_size=64, patch_size=8, embed_dim=32, depth=2, num_heads=4, out_chans=32, use_rel_pos=True,
                window_size=4, global_attn_indexes=(1,),
            )  # fmt: skip
            self.prompt_encoder = PromptEncoder(
                embed_dim=32, image_embedding_size=(8, 8), input_image_size=(64, 64), mask_in_chans=4
            )
            self.mask_decoder = MaskDecoder(
                transformer_dim=32, num_multimask_outputs=3,
                transformer=TwoWayTransformer(depth=2, embedding_dim=32, mlp_dim=64, num_heads=4),
            )  # fmt: skip

        def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
            points = (torch.tensor([[[10.0, 20.0], [30.0, 5.0]]]), torch.ones(1, 2))
            sparse, dense = self.prompt_encoder(points, None, None)
            return self.mask_decoder(
                self.image_encoder(x), self.prompt_encoder.get_dense_pe(), sparse, dense, multimask_output=True
            )

    return Model(), lambda model: model(images(64)[:1])


def _diffusers(name: str, attentions: int, make: object) -> None:
    case("diffusers", name, attentions)(make)  # type: ignore[arg-type]


def _unet() -> tuple[nn.Module, Run]:
    from diffusers import UNet2DConditionModel  # noqa: PLC0415

    model = UNet2DConditionModel(
        sample_size=8, block_out_channels=(16, 32), layers_per_block=1, cross_attention_dim=24, attention_head_dim=4,
        down_block_types=("CrossAttnDownBlock2D", "DownBlock2D"), norm_num_groups=4,
        up_block_types=("UpBlock2D", "CrossAttnUpBlock2D"),
    )  # fmt: skip
    return model, lambda model: model(torch.randn(2, 4, 8, 8), torch.tensor([3, 7]), torch.randn(2, 5, 24)).sample


def _dit() -> tuple[nn.Module, Run]:
    from diffusers import DiTTransformer2DModel  # noqa: PLC0415

    model = DiTTransformer2DModel(
        num_attention_heads=4, attention_head_dim=8, in_channels=4, out_channels=4, num_layers=2, norm_num_groups=4,
        sample_size=8, patch_size=2, num_embeds_ada_norm=10,
    )  # fmt: skip
    its = {"timestep": torch.tensor([3, 7]), "class_labels": torch.tensor([1, 2])}
    return model, lambda model: model(torch.randn(2, 4, 8, 8), **its).sample


def _vae() -> tuple[nn.Module, Run]:
    from diffusers import AutoencoderKL  # noqa: PLC0415

    model = AutoencoderKL(block_out_channels=(8, 16), down_block_types=("DownEncoderBlock2D",) * 2,
                          up_block_types=("UpDecoderBlock2D",) * 2, norm_num_groups=4)  # fmt: skip
    return model, lambda model: model(images(16)).sample


def _flux() -> tuple[nn.Module, Run]:
    from diffusers import FluxTransformer2DModel  # noqa: PLC0415

    model = FluxTransformer2DModel(
        patch_size=1, in_channels=4, num_layers=1, num_single_layers=1, attention_head_dim=16, num_attention_heads=2,
        joint_attention_dim=32, pooled_projection_dim=32, axes_dims_rope=(4, 4, 8),
    )  # fmt: skip
    return model, lambda model: model(
        hidden_states=torch.randn(2, 16, 4), encoder_hidden_states=torch.randn(2, 5, 32),
        pooled_projections=torch.randn(2, 32), timestep=torch.tensor([0.3, 0.7]), img_ids=torch.rand(16, 3),
        txt_ids=torch.rand(5, 3),
    ).sample  # fmt: skip


for _name, _count, _make in (("UNet2DConditionModel", 8, _unet), ("DiTTransformer2DModel", 2, _dit),
                             ("AutoencoderKL", 2, _vae), ("FluxTransformer2DModel", 2, _flux)):  # fmt: skip
    _diffusers(_name, _count, _make)


@case("kornia", "VisionTransformer", 2)
def kornia_vit() -> tuple[nn.Module, Run]:
    from kornia.models.vit import VisionTransformer  # noqa: PLC0415

    model = VisionTransformer(image_size=32, patch_size=8, embed_dim=32, depth=2, num_heads=4)
    return model, lambda model: model(images())


@case("kornia", "LoFTR's transformer, full attention", 4, order=(0, 2, 1))
def loftr() -> tuple[nn.Module, Run]:
    from kornia.feature.loftr.loftr_module import LocalFeatureTransformer  # noqa: PLC0415

    its = {"d_model": 32, "nhead": 4, "layer_names": ["self", "cross"], "attention": "full"}
    return LocalFeatureTransformer(its), lambda model: model(torch.randn(2, 9, 32), torch.randn(2, 9, 32))


def _monai(name: str, attentions: int, make: object) -> None:
    case("monai", name, attentions)(make)  # type: ignore[arg-type]


def _monai_vit() -> tuple[nn.Module, Run]:
    from monai.networks.nets import ViT  # noqa: PLC0415

    model = ViT(1, (16, 16), (8, 8), hidden_size=32, mlp_dim=64, num_layers=2, num_heads=4, spatial_dims=2)
    return model, lambda model: model(images(16, 1))[0]


def _swin_unetr() -> tuple[nn.Module, Run]:
    from monai.networks.nets import SwinUNETR  # noqa: PLC0415

    model = SwinUNETR(1, 2, feature_size=12, depths=(2, 2, 2, 2), num_heads=(2, 2, 2, 2), spatial_dims=2)
    return model, lambda model: model(images(64, 1))


def _attention_unet() -> tuple[nn.Module, Run]:
    from monai.networks.nets import DiffusionModelUNet  # noqa: PLC0415

    model = DiffusionModelUNet(
        spatial_dims=2, in_channels=1, out_channels=1, channels=(8, 16),
        attention_levels=(False, True), norm_num_groups=4,
        num_res_blocks=1, num_head_channels=8,
    )  # fmt: skip
    return model, lambda model: model(images(16, 1), torch.tensor([3, 7]))


for _name, _count, _make in (
    ("ViT", 2, _monai_vit),
    ("SwinUNETR", 8, _swin_unetr),
    ("DiffusionModelUNet", 4, _attention_unet),
):
    _monai(_name, _count, _make)
