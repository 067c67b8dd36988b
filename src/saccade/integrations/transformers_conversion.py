"""Convert transformers' latent, compressed and differential attention to saccade layers with the same weights."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from saccade.masks import Causal
from saccade.models.rope_config import rope_base, rope_reasons, rope_scaling
from saccade.nn import CompressedAttention, DifferentialAttention, Indexer, LatentAttention
from saccade.nn.projections import reasons_against_plain
from saccade.positions import Rotary
from saccade.support.errors import type_error, unsupported
from saccade.support.validation import check_type

_INDEXED = ("DeepseekV32Attention", "GlmMoeDsaAttention")
_LATENT = ("DeepseekV2Attention", "DeepseekV3Attention", *_INDEXED)
_COMPRESSED = "DeepseekV4Attention"
_DIFFERENTIAL = "DiffLlamaAttention"
_LATENT_PARTS = {
    "query_latent_projection": "q_a_proj",
    "query_norm": "q_a_layernorm",
    "query_projection": "q_b_proj",
    "latent_projection": "kv_a_proj_with_mqa",
    "latent_norm": "kv_a_layernorm",
    "expansion": "kv_b_proj",
    "output_projection": "o_proj",
}
_INDEXER_PARTS = {
    "indexer.query_projection": "indexer.wq_b",
    "indexer.key_projection": "indexer.wk",
    "indexer.key_norm": "indexer.k_norm",
    "indexer.weight_projection": "indexer.weights_proj",
}
_PROJECTIONS = {"query": "q_proj", "key": "k_proj", "value": "v_proj", "output": "o_proj"}


def from_transformers(module: nn.Module) -> LatentAttention | CompressedAttention | DifferentialAttention:
    """Convert a transformers attention module to a saccade layer with copied weights and equal outputs.

    ================================================ =================================================
    ``DeepseekV2Attention``, ``DeepseekV3Attention`` `saccade.nn.LatentAttention`
    ``DeepseekV32Attention``, ``GlmMoeDsaAttention`` `saccade.nn.LatentAttention` with an indexer, or with
                                                     ``selection_from`` if GLM's layer shares a selection
    ``DeepseekV4Attention`` with compressed entries  `saccade.nn.CompressedAttention`
    ``DiffLlamaAttention``                           `saccade.nn.DifferentialAttention`
    ================================================ =================================================

    Saccade's layers take only hidden states: positions, rotation and the causal mask are part of the layer. The two
    heads of a pair are adjacent in saccade, but half the number of heads apart in DiffLlama. A layer that shares a
    selection runs only in a `saccade.nn.DecoderStack`, at the same index as in the model.

    Args:
        module: an attention module of a model, for instance ``model.model.layers[0].self_attn``.

    Raises:
        TypeError: the module's class is not in the table.
        UnsupportedError: the rotation changes with the length, or the projections are not plain linear layers.
    """
    kind = type(module).__name__
    check_type("module", module, nn.Module, "be a module")
    if kind not in (*_LATENT, _COMPRESSED, _DIFFERENTIAL):
        raise type_error("module", f"be a {', '.join((*_LATENT, _COMPRESSED))} or {_DIFFERENTIAL}", kind)
    source: Any = module
    reasons = rope_reasons(_settings(source))
    linear = {name: part for name, part in source.named_modules() if name.endswith(("_proj", "_with_mqa"))}
    linear.pop("o_a_proj", None)  # the grouped projection of DeepSeek-V4
    if getattr(source, "indexer", None) is not None:
        linear |= {f"indexer.{name}": part for name, part in source.indexer.named_children() if name != "k_norm"}
    reasons += reasons_against_plain(linear, "saccade's layer")
    if kind == _COMPRESSED and source.compressor is None:
        reasons.append("it has only a window, and a CompressedAttention reads compressed entries as well")
    if reasons:
        raise unsupported(kind, reasons)
    if kind == _DIFFERENTIAL:
        layer: LatentAttention | CompressedAttention | DifferentialAttention = _differential(source)
    else:
        layer = _compressed(source) if kind == _COMPRESSED else _latent(source)
    weight = next(iter(linear.values())).weight
    return layer.to(weight.device, weight.dtype).train(source.training)


def _settings(module: Any) -> dict[str, Any]:
    """Return the configuration of a module, with the rotary settings of its layer."""
    settings: dict[str, Any] = module.config.to_dict()
    if type(module).__name__ == _COMPRESSED:
        rope = {key: x for key, x in settings["rope_parameters"]["compress"].items() if key != "partial_rotary_factor"}
        settings["rope_parameters"] = rope
    return settings


def _rotary(module: Any, head_dim: int, layout: Any, rotary_dim: int | None = None) -> Rotary:
    settings = _settings(module)
    base, scaling = rope_base(settings), rope_scaling(settings)
    return Rotary(head_dim, base=base, rotary_dim=rotary_dim, layout=layout, scaling=scaling)


def _latent(module: Any) -> LatentAttention:
    config = module.config
    # DeepSeek-V2 and the models with an indexer always rotate adjacent channels.
    is_interleaved = type(module).__name__ in ("DeepseekV2Attention", *_INDEXED) or config.rope_interleave
    ours = LatentAttention(
        config.hidden_size,
        module.num_heads,
        latent_dim=module.kv_lora_rank,
        head_dim=module.qk_head_dim,
        rotary_dim=module.qk_rope_head_dim,
        value_dim=module.v_head_dim,
        query_latent_dim=module.q_lora_rank,
        rotary=_rotary(module, module.qk_rope_head_dim, "interleaved" if is_interleaved else "half"),
        mask=Causal(),
        scale=module.scaling,
        norm_eps=module.kv_a_layernorm.variance_epsilon,
        dropout_p=module.attention_dropout,
        projection_bias=module.o_proj.bias is not None,
        **_selection(module),
    )
    parts = _LATENT_PARTS | ({} if ours.indexer is None else _INDEXER_PARTS)
    if module.q_lora_rank is None:
        parts = {name: theirs for name, theirs in parts.items() if not theirs.startswith("q_")}
        parts["query_projection"] = "q_proj"
    state = {
        f"{name}.{parameter}": x
        for name, theirs in parts.items()
        for parameter, x in module.get_submodule(theirs).state_dict().items()
    }
    ours.load_state_dict(state)
    return ours


def _selection(module: Any) -> dict[str, Any]:
    """Return the options of a latent layer that select keys: an indexer, or the index of the layer that has one."""
    theirs, name = getattr(module, "indexer", None), type(module).__name__
    if name not in _INDEXED:
        return {}
    if theirs is None:
        return {"selection_from": max(i for i in range(module.layer_idx) if module.config.indexer_types[i] == "full")}
    layout: Any = "half" if name == "DeepseekV32Attention" else "interleaved"
    ours = Indexer(
        theirs.hidden_size,
        theirs.index_topk,
        num_heads=theirs.n_heads,
        head_dim=theirs.head_dim,
        query_dim=theirs.q_lora_rank,
        rotary=_rotary(module, theirs.head_dim, layout, theirs.qk_rope_head_dim),
        norm_eps=theirs.k_norm.eps,
    )
    return {"indexer": ours}


def _compressed(module: Any) -> CompressedAttention:
    config, width, is_sparse = module.config, module.head_dim, hasattr(module.compressor, "indexer")
    rotary_dim = config.qk_rope_head_dim
    ours = CompressedAttention(
        config.hidden_size,
        module.num_heads,
        head_dim=width,
        rotary_dim=rotary_dim,
        block_size=module.compressor.compress_rate,
        window=module.sliding_window,
        overlap=is_sparse,
        k=config.index_topk if is_sparse else None,
        index_heads=config.index_n_heads if is_sparse else None,
        index_dim=config.index_head_dim if is_sparse else None,
        query_latent_dim=config.q_lora_rank,
        output_groups=config.o_groups,
        output_latent_dim=config.o_lora_rank,
        rotary=_rotary(module, rotary_dim, "interleaved"),
        norm_eps=config.rms_norm_eps,
        dropout_p=module.attention_dropout,
    )
    compressor = {"content_projection": "kv_proj", "gate_projection": "gate_proj", "norm": "kv_norm"}
    names = {
        "query_latent_projection": "q_a_proj",
        "query_norm": "q_a_norm",
        "query_projection": "q_b_proj",
        "key_projection": "kv_proj",
        "key_norm": "kv_norm",
        "output_projection": "o_b_proj",
        **{f"compressor.{name}": f"compressor.{theirs}" for name, theirs in compressor.items()},
    }
    if is_sparse:
        names |= {f"indexer.compressor.{name}": f"compressor.indexer.{theirs}" for name, theirs in compressor.items()}
        names["indexer.query_projection"] = "compressor.indexer.q_b_proj"
        names["indexer.weight_projection"] = "compressor.indexer.scorer.weights_proj"
    theirs = module.state_dict()
    state = {f"{name}.weight": theirs[f"{other}.weight"] for name, other in names.items()}
    state["mechanism.sink_logit"] = theirs["sinks"]
    state["output_latent_projection.weight"] = theirs["o_a_proj.weight"].unflatten(0, (config.o_groups, -1))
    for name, other in (("compressor", "compressor"), ("indexer.compressor", "compressor.indexer")):
        if f"{other}.position_bias" in theirs:
            state[f"{name}.position_bias"] = theirs[f"{other}.position_bias"]
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
        rotary=_rotary(module, width, "half"),
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
