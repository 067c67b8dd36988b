"""Convert transformers' latent and differential attention to saccade layers with the same weights."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from saccade.masks import Causal
from saccade.models.rope_config import rope_base, rope_reasons, rope_scaling
from saccade.nn import DifferentialAttention, LatentAttention
from saccade.nn.projections import reasons_against_plain
from saccade.positions import Rotary
from saccade.support.errors import type_error, unsupported
from saccade.support.validation import check_type

_LATENT = ("DeepseekV2Attention", "DeepseekV3Attention")
_DIFFERENTIAL = "DiffLlamaAttention"
_PROJECTIONS = {"query": "q_proj", "key": "k_proj", "value": "v_proj", "output": "o_proj"}


def from_transformers(module: nn.Module) -> LatentAttention | DifferentialAttention:
    """Convert a transformers attention module to a saccade layer with copied weights and equal outputs.

    ================================================ =================================
    ``DeepseekV2Attention``, ``DeepseekV3Attention`` `saccade.nn.LatentAttention`
    ``DiffLlamaAttention``                           `saccade.nn.DifferentialAttention`
    ================================================ =================================

    Saccade's layers take only hidden states: positions, rotation and the causal mask are part of the layer. The two
    heads of a pair are adjacent in saccade, but half the number of heads apart in DiffLlama.

    Args:
        module: an attention module of a model, for instance ``model.model.layers[0].self_attn``.

    Raises:
        TypeError: the module's class is not in the table.
        UnsupportedError: the rotation changes with the length, or the projections are not plain linear layers.
    """
    kind = type(module).__name__
    check_type("module", module, nn.Module, "be a module")
    if kind not in (*_LATENT, _DIFFERENTIAL):
        raise type_error("module", f"be a {', '.join(_LATENT)} or {_DIFFERENTIAL}", kind)
    source: Any = module
    reasons = rope_reasons(source.config.to_dict())
    linear = {name: part for name, part in source.named_children() if name.endswith(("_proj", "_with_mqa"))}
    reasons += reasons_against_plain(linear, "saccade's layer")
    if reasons:
        raise unsupported(kind, reasons)
    layer = _differential(source) if kind == _DIFFERENTIAL else _latent(source)
    return layer.to(source.o_proj.weight.device, source.o_proj.weight.dtype).train(source.training)


def _rotary(config: Any, head_dim: int, layout: Any) -> Rotary:
    settings = config.to_dict()
    return Rotary(head_dim, base=rope_base(settings), layout=layout, scaling=rope_scaling(settings))


def _latent(module: Any) -> LatentAttention:
    config = module.config
    # DeepSeek-V2 always rotates adjacent channels.
    is_interleaved = type(module).__name__ == "DeepseekV2Attention" or config.rope_interleave
    ours = LatentAttention(
        config.hidden_size,
        module.num_heads,
        latent_dim=module.kv_lora_rank,
        head_dim=module.qk_head_dim,
        rotary_dim=module.qk_rope_head_dim,
        value_dim=module.v_head_dim,
        query_latent_dim=module.q_lora_rank,
        rotary=_rotary(config, module.qk_rope_head_dim, "interleaved" if is_interleaved else "half"),
        mask=Causal(),
        scale=module.scaling,
        norm_eps=module.kv_a_layernorm.variance_epsilon,
        dropout_p=module.attention_dropout,
        projection_bias=module.o_proj.bias is not None,
    )
    parts = {
        "query_latent_projection": "q_a_proj",
        "query_norm": "q_a_layernorm",
        "query_projection": "q_proj" if module.q_lora_rank is None else "q_b_proj",
        "latent_projection": "kv_a_proj_with_mqa",
        "latent_norm": "kv_a_layernorm",
        "expansion": "kv_b_proj",
        "output_projection": "o_proj",
    }
    state = {
        f"{name}.{parameter}": x
        for name, theirs in parts.items()
        if getattr(ours, name) is not None
        for parameter, x in getattr(module, theirs).state_dict().items()
    }
    ours.load_state_dict(state)
    return ours


def _differential(module: Any) -> DifferentialAttention:
    config, width = module.config, module.head_dim
    ours = DifferentialAttention(
        config.hidden_size,
        config.num_attention_heads // 2,
        layer=module.layer_idx,
        num_kv_heads=config.num_key_value_heads // 2,
        mask=Causal(),
        rotary=_rotary(config, width, "half"),
        norm_eps=module.groupnorm.eps,
        projection_bias=module.o_proj.bias is not None,
    )
    state = {f"mechanism.{name}": getattr(module, name) for name, _ in ours.mechanism.named_parameters()}
    for name, theirs in _PROJECTIONS.items():
        for parameter, x in getattr(module, theirs).state_dict().items():
            state[f"{name}_projection.{parameter}"] = x if name == "output" else _paired(x, width)
    ours.load_state_dict(state)
    return ours


def _paired(rows: Tensor, width: int) -> Tensor:
    """Reorder the weight rows of DiffLlama's heads so that the heads of a pair, h and h + half, become adjacent."""
    return torch.stack(rows.unflatten(0, (2, -1, width)).unbind(0), 1).flatten(0, 2)
