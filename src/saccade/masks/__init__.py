"""WHO may attend to whom: rules on positions, and their algebra. True = may attend."""

from typing import TYPE_CHECKING

from saccade.lazily import lazily

if TYPE_CHECKING:
    from saccade.masks.algebra import After, And, Not, Or
    from saccade.masks.blocks import Blocks
    from saccade.masks.causal import Causal
    from saccade.masks.coarse import Coarse
    from saccade.masks.convert import as_mask
    from saccade.masks.dense import Dense
    from saccade.masks.documents import Documents
    from saccade.masks.from_others import (
        from_attention_mask,
        from_block_mask,
        from_cu_seqlens,
        from_key_padding_mask,
        from_position_ids,
        from_sliding_window,
    )
    from saccade.masks.full import Full
    from saccade.masks.global_tokens import Global
    from saccade.masks.grid.axial import Axial
    from saccade.masks.grid.neighborhood import Neighborhood
    from saccade.masks.grid.windows import ShiftedWindows
    from saccade.masks.mask import Mask
    from saccade.masks.padding import Padding
    from saccade.masks.parsing import parse
    from saccade.masks.per_item import PerItem
    from saccade.masks.power import through_layers as through_layers  # what Mask.__pow__ calls
    from saccade.masks.predicate import Predicate
    from saccade.masks.prefix import Prefix
    from saccade.masks.random_blocks import Random
    from saccade.masks.recipes import (
        bigbird,
        image_columns,
        image_neighbors,
        image_rows,
        longformer,
        prefix_lm,
        sliding_window,
        sparse_transformer,
        streaming,
    )
    from saccade.masks.segments import Segments
    from saccade.masks.strided import Strided
    from saccade.masks.window import Window
else:
    _HOMES = {
        "algebra": "After And Not Or",
        "blocks": "Blocks",
        "causal": "Causal",
        "coarse": "Coarse",
        "convert": "as_mask",
        "dense": "Dense",
        "documents": "Documents",
        "from_others": "from_attention_mask from_block_mask from_cu_seqlens from_key_padding_mask from_position_ids "
        "from_sliding_window",
        "full": "Full",
        "global_tokens": "Global",
        "grid.axial": "Axial",
        "grid.neighborhood": "Neighborhood",
        "grid.windows": "ShiftedWindows",
        "mask": "Mask",
        "padding": "Padding",
        "parsing": "parse",
        "per_item": "PerItem",
        "power": "through_layers",
        "predicate": "Predicate",
        "prefix": "Prefix",
        "random_blocks": "Random",
        "recipes": "bigbird image_columns image_neighbors image_rows longformer prefix_lm sliding_window "
        "sparse_transformer streaming",
        "segments": "Segments",
        "strided": "Strided",
        "window": "Window",
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
    "Blocks",
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
