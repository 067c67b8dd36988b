"""The features of attention that are looked for, each with a test of a model's configuration and modules."""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Callable, Iterable, Mapping
from typing import Any

from torch import nn

Test = Callable[[Mapping[str, Any], nn.Module], bool]


@dataclasses.dataclass(frozen=True)
class Feature:
    """A feature of attention in language models.

    Attributes:
        english, chinese: its name in both languages.
        ours: what has it in saccade, as code; None if nothing has.
        test: whether a model has it, from the default configuration as a dict, and a small model.
    """

    english: str
    chinese: str
    ours: str | None
    test: Test


def _value(*names: str) -> Callable[[Mapping[str, Any]], Any]:
    """Return a function that returns the first of some keys of a configuration that is set."""
    return lambda config: next((config[name] for name in names if config.get(name)), None)


def _kinds(config: Mapping[str, Any]) -> set[str]:
    return set(config.get("layer_types") or ())


def _ropes(config: Mapping[str, Any]) -> Iterable[Mapping[str, Any]]:
    """Yield the rotary settings of a configuration: one, or one for each kind of layer."""
    settings = config.get("rope_parameters") or {}
    if isinstance(settings, dict):
        inner = [one for one in settings.values() if isinstance(one, dict)]
        yield from inner or ([settings] if settings else [])


def _has_module(pattern: str) -> Test:
    """Return a test of the names of modules and parameters, of which a whole part must match."""
    regex = re.compile(rf"(^|.*\.)({pattern})(\..*|$)")
    return lambda config, model: any(
        regex.match(name) for name, _ in (*model.named_modules(), *model.named_parameters())
    )


def _heads(config: Mapping[str, Any]) -> tuple[int, int]:
    heads = _value("num_attention_heads", "n_head", "num_heads")(config)
    kv_heads = _value("num_key_value_heads", "num_kv_heads", "n_head_kv", "multi_query_group_num")(config)
    number = heads if isinstance(heads, int) else 0
    return number, kv_heads if isinstance(kv_heads, int) else number


def _is_depthwise(config: Mapping[str, Any], model: nn.Module) -> bool:
    convolutions = (module for module in model.modules() if isinstance(module, nn.Conv1d))
    return any(one.groups == one.in_channels > 1 for one in convolutions)


def _is_parallel(model: nn.Module) -> bool:
    """Return whether a layer has one norm for attention and feed-forward network, which then read the same tokens."""
    if model.config.to_dict().get("use_parallel_residual") or model.config.to_dict().get("parallel_attn"):
        return True
    for layers in (module for module in model.modules() if isinstance(module, nn.ModuleList) and len(module)):
        parts = dict(layers[0].named_children())
        norms = [name for name, part in parts.items() if "norm" in type(part).__name__.lower()]
        has_both = any("att" in name for name in parts) and any(
            re.search("mlp|feed_forward|ffn", name) for name in parts
        )
        if has_both and len(norms) == 1:
            return True
    return False


_WINDOW = _value("sliding_window", "attention_window_size", "local_attention_window", "window_size", "attention_window")
_INDEXER = _has_module(r"indexer")
_EXPERTS = _value("num_experts", "num_local_experts", "n_routed_experts", "moe_num_experts", "num_moe_experts")
_RECURRENT = {"linear_attention", "mamba", "recurrent", "conv", "gdn", "kda", "hybrid"}

FEATURES: tuple[Feature, ...] = (
    Feature(
        "grouped key heads",
        "分组的键头",
        "`MultiHeadAttention(num_kv_heads=)`",
        lambda config, model: 0 < _heads(config)[1] < _heads(config)[0],
    ),
    Feature(
        "learned position vectors",
        "可学习的位置向量",
        "`positions.Learned`",
        lambda config, model: any(
            isinstance(module, nn.Embedding) and re.search(r"wpe|position", name)
            for name, module in model.named_modules()
        ),
    ),
    Feature(
        "rotary positions", "旋转位置", "`positions.Rotary`", lambda config, model: any(True for _ in _ropes(config))
    ),
    Feature(
        "scaled rotary frequencies, by default",
        "默认缩放旋转频率",
        "`Rotary(scaling=)`",
        lambda config, model: any(one.get("rope_type", "default") != "default" for one in _ropes(config)),
    ),
    Feature(
        "part of the channels rotated",
        "只旋转部分通道",
        "`Rotary(rotary_dim=)`",
        lambda config, model: any(one.get("partial_rotary_factor", 1.0) not in (None, 1.0) for one in _ropes(config)),
    ),
    Feature(
        "rotary positions with several axes",
        "多轴旋转位置",
        "`Rotary(sections=)`",
        lambda config, model: any("mrope_section" in one for one in _ropes(config)),
    ),
    Feature(
        "layers without positions beside rotary ones",
        "旋转层与无位置层并存",
        "`LayerPattern(rotary=False)`",
        lambda config, model: bool(config.get("no_rope_layers") or config.get("no_rope_layer_interval")),
    ),
    Feature(
        "heads whose width is not embed_dim / heads",
        "头宽不等于 embed_dim / 头数",
        "`MultiHeadAttention(head_dim=)`",
        lambda config, model: _has_own_width(config),
    ),
    Feature(
        "norms of queries and keys",
        "查询与键的归一化",
        "`nn.QKNorm`",
        _has_module(r"(q|query)_(layer)?norm|qk_norm"),
    ),
    Feature(
        "a window in some or all layers",
        "部分或全部层带窗口",
        "`masks.sliding_window`, `LayerPattern`",
        lambda config, model: (
            "sliding_attention" in _kinds(config)
            or (bool(_WINDOW(config)) and config.get("use_sliding_window", True) is not False and not _kinds(config))
        ),
    ),
    Feature(
        "attention in chunks",
        "分块注意力",
        "`masks.Segments`",
        lambda config, model: "chunked_attention" in _kinds(config),
    ),
    Feature(
        "recurrent or linear layers",
        "循环层或线性注意力层",
        "`nn.Recurrence`, `nn.StateSpace`",
        lambda config, model: (
            bool(_kinds(config) & _RECURRENT) or _has_module(r"mamba|mixer|linear_attn|recurrent")(config, model)
        ),
    ),
    Feature("short convolutions", "短卷积", "`short_convolution=`", _is_depthwise),
    Feature(
        "latent keys and values (MLA)",
        "潜在键值（MLA）",
        "`nn.LatentAttention`",
        lambda config, model: bool(config.get("kv_lora_rank")),
    ),
    Feature("keys chosen by an indexer", "由索引器挑选键", "`nn.Indexer`, `mechanisms.TopK`", _INDEXER),
    Feature("entries of compressed blocks", "压缩条目", "`nn.CompressedAttention`", _has_module("compressor")),
    Feature("learned sinks", "可学习的汇点", "`Softmax(sink_logit=)`", _has_module(r"sinks?|attention_sink(s|_bias)?")),
    Feature(
        "a cap on scores",
        "得分上限（softcap）",
        "`Softmax(softcap=)`",
        lambda config, model: bool(
            _value("attn_logit_softcapping", "attention_logit_softcapping", "attn_logit_cap")(config)
        ),
    ),
    Feature(
        "temperatures that depend on the position",
        "随位置变化的温度",
        "`positions.QueryTemperature`",
        lambda config, model: bool(_value("attn_temperature_tuning", "llama_4_scaling_beta", "attn_scale")(config)),
    ),
    Feature(
        "keys shared between layers",
        "跨层共享的键",
        "`DecoderConfig(kv_layers=)`",
        lambda config, model: bool(_value("num_kv_shared_layers", "kv_sharing", "cla_share_factor")(config)),
    ),
    Feature(
        "attention and feed-forward network side by side",
        "注意力与前馈并行",
        "`DecoderLayer(parallel=)`",
        lambda config, model: _is_parallel(model),
    ),
    Feature(
        "a mixture of experts",
        "混合专家",
        "`nn.MixtureOfExperts` (Llama 4's form)",
        lambda config, model: bool(_EXPERTS(config)),
    ),
)


def _has_own_width(config: Mapping[str, Any]) -> bool:
    heads, _ = _heads(config)
    width, head_dim = _value("hidden_size", "n_embd", "d_model")(config), config.get("head_dim")
    return bool(heads and isinstance(width, int) and isinstance(head_dim, int)) and head_dim * heads != width


def features_of(config: Mapping[str, Any], model: nn.Module) -> list[str]:
    """Return the English names of the features that a model has."""
    return [feature.english for feature in FEATURES if feature.test(config, model)]
