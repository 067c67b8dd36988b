"""Masks and their algebra. A mask defines, by position, which query may attend to which key: True = may attend."""

from typing import TYPE_CHECKING

from saccade.support.lazy_imports import lazily

if TYPE_CHECKING:
    from saccade.masks.algebra import After, And, Not, Or
    from saccade.masks.convert.as_mask import as_mask
    from saccade.masks.convert.interop import (
        from_attention_mask,
        from_block_mask,
        from_cu_seqlens,
        from_key_padding_mask,
        from_position_ids,
        from_sliding_window,
    )
    from saccade.masks.convert.parse import parse
    from saccade.masks.grid.axial import Axial
    from saccade.masks.grid.image_after_text import image_columns, image_neighbors, image_rows
    from saccade.masks.grid.neighborhood import Neighborhood
    from saccade.masks.grid.windows import ShiftedWindows
    from saccade.masks.mask import Mask
    from saccade.masks.presets import (
        bigbird,
        longformer,
        prefix_lm,
        shared_prefix,
        sliding_window,
        sparse_transformer,
        streaming,
    )
    from saccade.masks.receptive_field import through_layers as through_layers  # called by Mask.__pow__
    from saccade.masks.rules.block_coarse import Coarse
    from saccade.masks.rules.block_diffusion import BlockDiffusion
    from saccade.masks.rules.blocks import Blocks
    from saccade.masks.rules.causal import Causal
    from saccade.masks.rules.dense import Dense
    from saccade.masks.rules.documents import Documents
    from saccade.masks.rules.full import Full
    from saccade.masks.rules.global_tokens import Global
    from saccade.masks.rules.image_bidirectional import ImageBidirectional
    from saccade.masks.rules.padding import Padding
    from saccade.masks.rules.per_batch_item import PerItem
    from saccade.masks.rules.predicate import Predicate
    from saccade.masks.rules.prefix import Prefix
    from saccade.masks.rules.prefix_per_document import PrefixPerDocument
    from saccade.masks.rules.random_blocks import Random
    from saccade.masks.rules.segments import Segments
    from saccade.masks.rules.strided import Strided
    from saccade.masks.rules.tree import Tree
    from saccade.masks.rules.window import Window
else:
    _HOMES = {
        "algebra": "After And Not Or",
        "rules.block_diffusion": "BlockDiffusion",
        "rules.blocks": "Blocks",
        "rules.causal": "Causal",
        "rules.block_coarse": "Coarse",
        "convert.as_mask": "as_mask",
        "rules.dense": "Dense",
        "rules.documents": "Documents",
        "convert.interop": "from_attention_mask from_block_mask from_cu_seqlens from_key_padding_mask "
        "from_position_ids from_sliding_window",
        "rules.full": "Full",
        "rules.global_tokens": "Global",
        "rules.image_bidirectional": "ImageBidirectional",
        "grid.axial": "Axial",
        "grid.image_after_text": "image_columns image_neighbors image_rows",
        "grid.neighborhood": "Neighborhood",
        "grid.windows": "ShiftedWindows",
        "mask": "Mask",
        "rules.padding": "Padding",
        "convert.parse": "parse",
        "rules.per_batch_item": "PerItem",
        "receptive_field": "through_layers",
        "rules.predicate": "Predicate",
        "rules.prefix": "Prefix",
        "rules.prefix_per_document": "PrefixPerDocument",
        "rules.random_blocks": "Random",
        "presets": "bigbird longformer prefix_lm shared_prefix sliding_window sparse_transformer streaming",
        "rules.segments": "Segments",
        "rules.strided": "Strided",
        "rules.tree": "Tree",
        "rules.window": "Window",
    }
    __getattr__, __dir__ = lazily(__name__, _HOMES)

__all__ = [
    "Mask",
    "And",
    "Or",
    "Not",
    "After",
    "Full",
    "Causal",
    "Window",
    "Global",
    "Strided",
    "Segments",
    "Random",
    "Prefix",
    "PrefixPerDocument",
    "ImageBidirectional",
    "Tree",
    "Blocks",
    "BlockDiffusion",
    "Coarse",
    "Neighborhood",
    "Axial",
    "ShiftedWindows",
    "Padding",
    "PerItem",
    "Documents",
    "Predicate",
    "Dense",
    "sliding_window",
    "longformer",
    "bigbird",
    "streaming",
    "sparse_transformer",
    "prefix_lm",
    "shared_prefix",
    "image_rows",
    "image_columns",
    "image_neighbors",
    "parse",
    "as_mask",
    "from_attention_mask",
    "from_block_mask",
    "from_cu_seqlens",
    "from_key_padding_mask",
    "from_position_ids",
    "from_sliding_window",
]
