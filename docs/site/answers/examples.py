"""The examples that are asked about, as the page shows them, and their sizes; all that is exported has one."""

from __future__ import annotations

from saccade import caches, masks, mechanisms
from saccade.caches import LayerCache
from saccade.masks import Mask

TOKENS = 4096  # of the tables of masks; a grid of 64 by 64 is as many
FEW = 24  # tokens that mechanisms and caches are run on
SHORT, LONG = 256, 512  # lengths at which costs are told
WIDTH = 64

MASKS = {
    "Full": "Full()",
    "Causal": "Causal()",
    "Window": "Window(128, 128)",
    "Global": "Global([0])",
    "Strided": "Strided(64)",
    "Segments": "Segments(256, 256)",
    "Random": "Random(3, 64)",
    "Prefix": "Prefix(512)",
    "Blocks": "Blocks(torch.eye(64).bool(), 64)",
    "BlockDiffusion": "BlockDiffusion(256, 2048)",
    "Coarse": "Coarse(Window(1, 0), 64)",
    "Neighborhood": "Neighborhood(64, 64, 3)",
    "Axial": 'Axial(64, 64, "both")',
    "ShiftedWindows": "ShiftedWindows(64, 64, 8, 4)",
    "PrefixPerDocument": "PrefixPerDocument([1024] * 4, [256] * 4)",
    "ImageBidirectional": "ImageBidirectional(torch.arange(4096) // 1024)",
    "Tree": "Tree(torch.arange(4096).sub(1) // 2)",
    "Padding": "Padding([3072])",
    "PerItem": "PerItem([Causal()])",
    "Documents": "Documents([1024] * 4, Causal())",
    "Predicate": "Predicate(lambda b, h, q, kv: (q - kv).abs() <= 128)",
    "Dense": "Dense((torch.arange(2**24) % 3 > 0).view(4096, -1))",
    "And": "Causal() & Padding([3072])",
    "Or": "Window(128, 128) | Global([0])",
    "Not": "~Window(128, 128)",
    "After": "Causal().after(1)",
    "sliding_window": "sliding_window(256)",
    "longformer": "longformer(128)",
    "bigbird": "bigbird(64)",
    "streaming": "streaming(4, 256)",
    "sparse_transformer": "sparse_transformer(64)",
    "prefix_lm": "prefix_lm(512)",
    "shared_prefix": "shared_prefix([2048, 1024, 1024])",
    "image_rows": "image_rows(64, 63, 64)",
    "image_columns": "image_columns(64, 63, 64)",
    "image_neighbors": "image_neighbors(64, 63, 64, 3)",
}

MECHANISMS = {
    "Softmax": "Softmax()",
    "TopK": "TopK(DotProducts(), 4)",
    "TopK of index keys": "TopK(LightningIndexer(q, k, w), 4)",
    "NativeSparse": "NativeSparse(4, 3, 6)",
    "Differential": "Differential(head_dim // 2)",
    "Forgetting": "Forgetting(head_dim - 1)",
    "PaTH": "PaTH(head_dim // 2 - 1)",
    "Linear": "Linear()",
    "Performer": "Performer(64)",
    "Linformer": "Linformer(kv_len, 6)",
    "Nystrom": "Nystrom(6)",
    "GatedLinear": "GatedLinear()",
    "Delta": "Delta()",
    "GatedDelta2": "GatedDelta2()",
    "DeltaProduct": "DeltaProduct(1)",
    "RWKV7": "RWKV7()",
    "Mesa": "Mesa()",
    "SSD": "SSD(heads)",
    "Mamba3": "Mamba3()",
    "S4D": "S4D(heads, 8)",
    "ShortConvolution": "ShortConvolution(heads, 4)",
    "CompressiveMemory": "CompressiveMemory(heads, segment)",
}

CACHES = {
    "KVCache": "KVCache()",
    "LatentCache": "LatentCache(head_dim)",
    "IndexedCache": "IndexedCache()",
    "IndexedLatentCache": "IndexedLatentCache(head_dim)",
    "SinkWindowCache": "SinkWindowCache(4, 8)",
    "SegmentCache": "SegmentCache(8, 4)",
    "BlockSelectCache": "BlockSelectCache(4, 32)",
    "HeavyHitterCache": "HeavyHitterCache(32)",
    "SnapKVCache": "SnapKVCache(32)",
    "EvictingCache": "ShortKeys(32)",
    "Int8Cache": "Int8Cache(4)",
    "QuantizedCache": "QuantizedCache(4, 4)",
    "RecurrentCache": "RecurrentCache()",
    "CompressiveCache": "CompressiveCache()",
    "EntryCache": "EntryCache(8, 16)",
    "CrossCache": "CrossCache()",
}


_PRESETS = ("saccade.masks.presets", "saccade.masks.grid.image_after_text")


def exported_masks() -> list[str]:
    """Masks, and the recipes that are made of them; not what reads masks from elsewhere."""
    found = []
    for name in masks.__all__:
        one = getattr(masks, name)
        is_class = isinstance(one, type) and issubclass(one, Mask) and one is not Mask
        if is_class or getattr(one, "__module__", "") in (
            "saccade.masks.presets",
            "saccade.masks.grid.image_after_text",
        ):
            found.append(name)
    return found


def exported_mechanisms() -> list[str]:
    """Mechanisms."""
    return [name for name in mechanisms.__all__ if name != "Mechanism"]


def exported_caches() -> list[str]:
    """Return caches of a layer."""
    found = {name: getattr(caches, name) for name in caches.__all__}
    kinds = {name: kind for name, kind in found.items() if isinstance(kind, type) and issubclass(kind, LayerCache)}
    return [name for name, kind in kinds.items() if kind is not LayerCache]


def missing() -> list[str]:
    """Return exported names without an example, and examples of names that are not exported."""
    told = {*MASKS, *CACHES, *(name.partition(" ")[0] for name in MECHANISMS)}
    return sorted(told.symmetric_difference((*exported_masks(), *exported_mechanisms(), *exported_caches())))
