"""Hints for names from other libraries and papers: the `AttributeError` suggests saccade's name instead."""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping
from typing import NoReturn

_SE = "ChannelAttention(channels) is squeeze-and-excitation"
_MHA = "nn.MultiHeadAttention"

OTHER_NAMES: Mapping[str, Mapping[str, str]] = {
    "": {
        **dict.fromkeys(("MultiHeadAttention", "MultiheadAttention", "MHA", "Attention"), f"saccade.{_MHA}"),
        "scaled_dot_product_attention": "saccade.attention(query, key, value, mask)",
        "flash_attention": "saccade.attention chooses the kernel",
        "SelfAttention": f"saccade.{_MHA}",
        "Mask": "saccade.masks.Mask",
        "Causal": "saccade.masks.Causal()",
        "Window": "saccade.masks.Window(left, right)",
        "sliding_window": "saccade.masks.sliding_window(n)",
        "KVCache": "saccade.caches.KVCache",
        "replace": "saccade.replace_attention(model)",
        "report": "saccade.viz.report",
    },
    "vision": {
        **dict.fromkeys(("SE", "SEBlock", "SELayer", "SEModule", "SqueezeExcitation", "SqueezeExcite"), _SE),
        "SqueezeAndExcitation": _SE,
        **dict.fromkeys(("ECABlock", "EcaModule", "ECALayer"), "ECA(channels)"),
        **dict.fromkeys(("NonLocalBlock", "NonLocalBlock2d", "NonLocal2d"), "NonLocal(channels)"),
        **dict.fromkeys(("PAM", "DANet"), "PositionAttention(channels)"),
    },
    "masks": {
        **dict.fromkeys(("SlidingWindow", "Sliding", "LocalAttention", "Local"), "sliding_window(n), the last n keys"),
        **dict.fromkeys(("CausalMask", "LowerTriangular", "LowerTriangularMask", "Triangular"), "Causal()"),
        **dict.fromkeys(("Longformer", "BigBird", "Streaming"), "a function in lower case, such as longformer(256)"),
        **dict.fromkeys(("StreamingLLM", "Sink", "Sinks"), "streaming(sink_tokens, window)"),
        "PrefixLM": "Prefix(length), or prefix_lm(length)",
        **dict.fromkeys(("Packed", "Packing", "DocumentMask", "BlockDiagonal"), "Documents(lengths)"),
        **dict.fromkeys(("PaddingMask", "KeyPadding"), "Padding(lengths)"),
        **dict.fromkeys(("Dilated", "Sparse"), "Strided(step), or sparse_transformer(step)"),
        "NATTEN": "Neighborhood(height, width, radius)",
    },
    "positions": {
        **dict.fromkeys(("RoPE", "RotaryEmbedding", "Rope"), "Rotary"),
        **dict.fromkeys(("Alibi", "AliBi"), "ALiBi(num_heads)"),
        **dict.fromkeys(("RelativeBias", "RelativePositionBias", "T5Bias"), "T5(num_heads), or Clipped"),
        **dict.fromkeys(("PositionalEncoding", "PositionalEmbedding"), "Sinusoidal, or Learned"),
        "Shaw": "ShawKeys",
    },
    "mechanisms": {
        **dict.fromkeys(("Mamba", "Mamba2"), "SSD, which runs in saccade.nn.Recurrence"),
        **dict.fromkeys(("DeltaNet", "GatedDeltaNet"), "Delta, which runs in saccade.nn.Recurrence"),
        **dict.fromkeys(("GatedDeltaNet2", "GDN2"), "GatedDelta2, which runs in saccade.nn.Recurrence"),
        **dict.fromkeys(("KDA", "KimiDeltaAttention"), "Delta, with a decay for each channel"),
        "MesaNet": "Mesa",
        **dict.fromkeys(("RWKV", "Rwkv7"), "RWKV7, which runs in saccade.nn.Recurrence"),
        "GatedDeltaProduct": "DeltaProduct, with a decay",
        **dict.fromkeys(("FoX", "ForgettingTransformer"), "Forgetting, which runs in saccade.nn.ForgettingAttention"),
        **dict.fromkeys(("RetNet", "GLA", "Retention", "LightningAttention"), "GatedLinear"),
        **dict.fromkeys(("Nystromformer", "Nystroem"), "Nystrom(landmarks)"),
        **dict.fromkeys(("LinearAttention", "Hyena", "Based"), "Linear(), or another mechanism of this module"),
        **dict.fromkeys(("MoBA", "NSA", "DSA", "TopKAttention"), "TopK(scorer, k)"),
        **dict.fromkeys(("SlidingWindow", "Window", "Longformer", "BigBird"), "a mask: see saccade.masks"),
    },
    "nn": {
        **dict.fromkeys(("MultiheadAttention", "MHA", "Attention", "SelfAttention", "GQA"), "MultiHeadAttention"),
        **dict.fromkeys(("MLA", "MultiHeadLatentAttention"), "LatentAttention"),
        **dict.fromkeys(("DSA", "LightningIndexer"), "LatentAttention(indexer=Indexer(...))"),
        **dict.fromkeys(("CSA", "HCA", "DeepseekV4Attention"), "CompressedAttention"),
        **dict.fromkeys(("TransformerEncoderLayer", "TransformerEncoder"), "EncoderLayer and EncoderStack"),
        **dict.fromkeys(("TransformerDecoderLayer", "TransformerDecoder"), "DecoderLayer and DecoderStack"),
        **dict.fromkeys(("MLP", "FFN"), "FeedForward"),
        **dict.fromkeys(("SE", "SEBlock"), "saccade.vision.ChannelAttention"),
    },
    "caches": {
        **dict.fromkeys(("StreamingLLM", "SinkCache", "StreamingCache"), "SinkWindowCache"),
        **dict.fromkeys(("H2O", "H2OCache"), "HeavyHitterCache"),
        "SnapKV": "SnapKVCache",
        **dict.fromkeys(("DynamicCache", "StaticCache"), "KVCache for a layer, Cache for a model"),
        **dict.fromkeys(("QuantoQuantizedCache", "HQQQuantizedCache", "KIVICache"), "QuantizedCache(bits)"),
        "Quest": "BlockSelectCache",
    },
    "models": {
        **dict.fromkeys(("ViT", "VisionEncoder"), "VisionTransformer"),
        **dict.fromkeys(("DETR", "Detr"), "SetDecoder"),
        **dict.fromkeys(("CLIP", "Clip"), "DualEncoder"),
        **dict.fromkeys(("BERT", "Bert", "MiniLM"), "Encoder, or minilm()"),
        **dict.fromkeys(("GPT", "GPT2", "Llama", "LM"), "Decoder, or small_decoder()"),
        "T5": "EncoderDecoder",
    },
    "viz": {
        **dict.fromkeys(("head_view", "model_view", "bertviz"), "report(recording, path)"),
        **dict.fromkeys(("attention_map", "plot", "show", "draw", "attention"), "heatmap(matrix, head=0)"),
        **dict.fromkeys(("heads", "grid"), "head_grid(matrices)"),
    },
}
"""Saccade's equivalents of names from other libraries and papers, by subpackage ("" for saccade itself) and name."""


def no_attribute(package: str, name: str) -> AttributeError:
    """Return the error for a name that a package lacks. It suggests saccade's equivalent if other libraries use it."""
    ours = OTHER_NAMES.get(package.removeprefix("saccade").removeprefix("."), {}).get(name)
    hint = "" if ours is None else f".\n    Hint: {ours}"
    text = f"module {package!r} has no attribute {name!r}{hint}"
    return AttributeError(text, name=name, obj=sys.modules[package])


def other_names(package: str) -> Callable[[str], NoReturn]:
    """Return a ``__getattr__`` for a package without lazy imports. It always raises the error from `no_attribute`."""

    def refuse(name: str) -> NoReturn:
        raise no_attribute(package, name)

    return refuse
