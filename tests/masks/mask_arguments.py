"""Values for every argument of every mask and recipe, and a table of the values that each argument takes."""

from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from torch.nn.attention.flex_attention import create_block_mask

from saccade import masks

VALUES: dict[str, Callable[[], Any]] = {
    "None": lambda: None,
    "True": lambda: True,
    "False": lambda: False,
    "-3": lambda: -3,
    "0": lambda: 0,
    "1": lambda: 1,
    "3": lambda: 3,
    "2**21": lambda: 2**21,
    "2**35": lambda: 2**35,
    "2**50": lambda: 2**50,
    "2**62": lambda: 2**62,
    "10**30": lambda: 10**30,
    "2.5": lambda: 2.5,
    "3.0": lambda: 3.0,
    "nan": lambda: float("nan"),
    "inf": lambda: float("inf"),
    "1j": lambda: 1j,
    "empty text": lambda: "",
    "text": lambda: "abc",
    "digits": lambda: "3",
    "left": lambda: "left",
    "rows": lambda: "rows",
    "bytes": lambda: b"ab",
    "[]": list,
    "()": lambda: (),
    "[[]]": lambda: [[]],
    "[3]": lambda: [3],
    "(2, 1)": lambda: (2, 1),
    "[[1, 2], [3]]": lambda: [[1, 2], [3]],
    "[1, [2]]": lambda: [1, [2]],
    "[[[1]]]": lambda: [[[1]]],
    "[True]": lambda: [True],
    "[[True]]": lambda: [[True]],
    "[[True], [True, False]]": lambda: [[True], [True, False]],
    "[[True, 0]]": lambda: [[True, 0]],
    "[2.5]": lambda: [2.5],
    "[-1]": lambda: [-1],
    "[None]": lambda: [None],
    "['1']": lambda: ["1"],
    "[2**35]": lambda: [2**35],
    "[10**30]": lambda: [10**30],
    "[np.int64]": lambda: [np.int64(3)],
    "[tensor]": lambda: [torch.tensor([1, 2])],
    "[tensor of no dimension]": lambda: [torch.tensor(3)],
    "[float tensor]": lambda: [torch.tensor([1.5])],
    "{1, 2}": lambda: {1, 2},
    "{1: 2}": lambda: {1: 2},
    "range": lambda: range(3),
    "generator": lambda: (n for n in (1, 2)),
    "object": object,
    "function": lambda: lambda b, h, q, kv: q >= kv,
    "class": lambda: int,
    "class of masks": lambda: masks.Causal,
    "mask": masks.Causal,
    "(mask,)": lambda: (masks.Causal(),),
    "(mask, 3)": lambda: (masks.Causal(), 3),
    "np.int64": lambda: np.int64(3),
    "np.bool_": lambda: np.bool_(True),
    "np.float64": lambda: np.float64(2.5),
    "array of no dimension": lambda: np.array(3),
    "int array": lambda: np.array([1, 2]),
    "float array": lambda: np.array([1.5, 2.0]),
    "bool array": lambda: np.array([[True, False], [True, True]]),
    "object array": lambda: np.array([None, 1], dtype=object),
    "tensor of no dimension": lambda: torch.tensor(3),
    "int tensor": lambda: torch.tensor([1, 2]),
    "uint8 tensor": lambda: torch.tensor([1, 2], dtype=torch.uint8),
    "int tensor, 2-D": lambda: torch.tensor([[1, 2], [3, 0]]),
    "int tensor, 3-D": lambda: torch.ones(1, 1, 2, dtype=torch.int64),
    "negative tensor": lambda: torch.tensor([1, -2]),
    "empty tensor": lambda: torch.tensor([], dtype=torch.int64),
    "float tensor": lambda: torch.tensor([1.0, 2.0]),
    "tensor with grad": lambda: torch.ones(2, requires_grad=True),
    "parameter": lambda: torch.nn.Parameter(torch.ones(2, 2)),
    "nan tensor": lambda: torch.tensor([float("nan")]),
    "complex tensor": lambda: torch.ones(2, dtype=torch.complex64),
    "bool tensor, 0-D": lambda: torch.tensor(True),
    "bool tensor, 1-D": lambda: torch.tensor([True, False]),
    "bool tensor": lambda: torch.tensor([[True, False], [True, True]]),
    "bool tensor, 5-D": lambda: torch.ones(1, 1, 1, 2, 2, dtype=torch.bool),
    "int tensor on meta": lambda: torch.ones(2, dtype=torch.int64, device="meta"),
    "bool tensor on meta": lambda: torch.ones(2, 2, dtype=torch.bool, device="meta"),
    "sparse int tensor": lambda: torch.tensor([1, 2]).to_sparse(),
    "sparse bool tensor": lambda: torch.eye(2, dtype=torch.bool).to_sparse(),
}

# The values that each kind of argument takes, by the names above.
MASK = {"mask"}
COUNTS = {"0", "1", "3", "np.int64", "2**21", "2**35", "2**50"}
FROM_1 = COUNTS - {"0"}
SIZES = FROM_1 - {"2**50"}
UNLIMITED = COUNTS | {"2**62", "10**30"}
FLAGS = {"True", "False", "np.bool_"}
INT_LISTS = {"[3]", "(2, 1)", "range", "generator", "[2**35]", "int tensor", "uint8 tensor", "int array", "[np.int64]"}
POSITIONS = INT_LISTS | {"[]", "()", "{1, 2}", "empty tensor"}
LAYOUTS = {"[[True]]", "bool array", "bool tensor"}
TENSORS = {"bool tensor, 0-D", "bool tensor, 1-D", "bool tensor", "bool tensor on meta"}
PARTS = {"(mask,)"}
IMAGE = (
    {"text_len": 2, "height": 2, "width": 3},
    {"text_len": SIZES | {"0"}, "height": SIZES, "width": SIZES},
)

# Constructors by name: the function, right arguments, and the values that each of them takes.
CONSTRUCTORS: dict[str, tuple[Callable[..., Any], dict[str, Any], dict[str, set[str]]]] = {
    "And": (masks.And, {"parts": (masks.Causal(),)}, {"parts": PARTS}),
    "Or": (masks.Or, {"parts": (masks.Causal(),)}, {"parts": PARTS}),
    "Not": (masks.Not, {"part": masks.Causal()}, {"part": MASK}),
    "After": (masks.After, {"rule": masks.Causal(), "length": 1}, {"rule": MASK, "length": SIZES | {"0"}}),
    "Causal.after": (masks.Causal().after, {"length": 1}, {"length": SIZES | {"0"}}),
    "Window": (
        masks.Window,
        {"left": 1, "right": 1},
        {"left": UNLIMITED | {"None"}, "right": UNLIMITED | {"None"}},
    ),
    "Global": (
        masks.Global,
        {"positions": [0], "sees": True, "seen": True},
        {"positions": POSITIONS, "sees": FLAGS, "seen": FLAGS},
    ),
    "Strided": (masks.Strided, {"step": 2}, {"step": FROM_1}),
    "Segments": (masks.Segments, {"segment": 2, "memory": 1}, {"segment": SIZES, "memory": SIZES | {"0"}}),
    "Random": (
        masks.Random,
        {"blocks_per_row": 2, "block_size": 2, "seed": 0},
        {"blocks_per_row": {"1", "3", "np.int64"}, "block_size": SIZES, "seed": COUNTS | {"2**62"}},
    ),
    "Prefix": (masks.Prefix, {"length": 2}, {"length": COUNTS}),
    "Blocks": (masks.Blocks, {"layout": [[True]], "block_size": 2}, {"layout": LAYOUTS, "block_size": SIZES}),
    "Coarse": (masks.Coarse, {"rule": masks.Causal(), "block_size": 2}, {"rule": MASK, "block_size": SIZES}),
    "BlockDiffusion": (
        masks.BlockDiffusion,
        {"block": 2, "length": 3},
        {"block": SIZES, "length": SIZES},
    ),
    "PrefixPerDocument": (
        masks.PrefixPerDocument,
        {"lengths": [7], "prefixes": [2]},
        {"lengths": {"[3]", "[np.int64]"}, "prefixes": {"[3]", "[np.int64]"}},
    ),
    "ImageBidirectional": (
        masks.ImageBidirectional,
        {"groups": [-1, 0]},
        {"groups": INT_LISTS | {"[-1]", "[[1, 2], [3]]", "[tensor]", "int tensor, 2-D"}},
    ),
    "Tree": (masks.Tree, {"parents": [-1, 0]}, {"parents": {"[-1]"}}),
    "shared_prefix": (
        masks.shared_prefix,
        {"lengths": [2, 3]},
        {"lengths": INT_LISTS - {"[2**35]"} | {"[[1, 2], [3]]", "[tensor]", "int tensor, 2-D"}},
    ),
    "Neighborhood": (
        masks.Neighborhood,
        {"height": 3, "width": 3, "radius": 1},
        {"height": SIZES, "width": SIZES, "radius": UNLIMITED | {"(2, 1)"}},
    ),
    "Axial": (
        masks.Axial,
        {"height": 3, "width": 3, "axis": "both"},
        {"height": SIZES, "width": SIZES, "axis": {"rows"}},
    ),
    "ShiftedWindows": (
        masks.ShiftedWindows,
        {"height": 3, "width": 3, "window": 2, "shift": 0},
        {"height": SIZES, "width": SIZES, "window": SIZES, "shift": {"0", "1"}},
    ),
    "Padding": (
        masks.Padding,
        {"lengths": [2], "side": "left", "padded_len": 2**40},
        {"lengths": INT_LISTS, "side": {"left"}, "padded_len": COUNTS - {"0", "1"}},
    ),
    "Padding, on the right": (
        masks.Padding,
        {"lengths": [2], "padded_len": None},
        {"lengths": INT_LISTS, "padded_len": COUNTS - {"0", "1"} | {"None"}},
    ),
    "Documents": (
        masks.Documents,
        {"lengths": [2], "rule": None},
        {
            "lengths": INT_LISTS - {"[2**35]"} | {"[[]]", "[[1, 2], [3]]", "[tensor]", "int tensor, 2-D"},
            "rule": {"mask", "None"},
        },
    ),
    "Predicate": (
        masks.Predicate,
        {"function": lambda b, h, q, kv: q >= kv},
        {"function": {"function", "mask"}},
    ),
    "Dense": (masks.Dense, {"allowed": torch.ones(2, 2, dtype=torch.bool)}, {"allowed": TENSORS}),
    "sliding_window": (masks.sliding_window, {"window": 2}, {"window": UNLIMITED - {"0"}}),
    "longformer": (
        masks.longformer,
        {"each_side": 1, "positions": [0]},
        {"each_side": UNLIMITED, "positions": POSITIONS},
    ),
    "bigbird": (
        masks.bigbird,
        {"block_size": 2, "window_blocks": 3, "global_blocks": 0, "random_blocks": 1, "seed": 0},
        {
            "block_size": SIZES,
            "window_blocks": {"1", "3", "np.int64"},  # the others are even
            "global_blocks": {"0", "1", "3", "np.int64"},
            "random_blocks": {"0", "1", "3", "np.int64"},
            "seed": COUNTS | {"2**62"},
        },
    ),
    "streaming": (
        masks.streaming,
        {"sink_tokens": 1, "window": 2},
        {"sink_tokens": COUNTS, "window": UNLIMITED - {"0"}},
    ),
    "sparse_transformer": (masks.sparse_transformer, {"step": 2}, {"step": FROM_1}),
    "prefix_lm": (masks.prefix_lm, {"length": 2}, {"length": COUNTS}),
    "image_rows": (masks.image_rows, *IMAGE),
    "image_columns": (masks.image_columns, *IMAGE),
    "image_neighbors": (masks.image_neighbors, IMAGE[0] | {"radius": 1}, IMAGE[1] | {"radius": UNLIMITED | {"(2, 1)"}}),
    "PerItem": (masks.PerItem, {"rules": (masks.Causal(),)}, {"rules": PARTS}),
    "from_attention_mask": (
        masks.from_attention_mask,
        {"attention_mask": torch.ones(1, 2)},
        {"attention_mask": {"bool tensor", "parameter"}},
    ),
    "from_cu_seqlens": (
        masks.from_cu_seqlens,
        {"cu_seqlens": [0, 2], "rule": None},
        {"cu_seqlens": set(), "rule": MASK | {"None"}},
    ),
    "from_position_ids": (
        masks.from_position_ids,
        {"position_ids": torch.tensor([0, 1]), "rule": None},
        {"position_ids": set(), "rule": MASK | {"None"}},
    ),
    "from_sliding_window": (
        masks.from_sliding_window,
        {"sliding_window": 2},
        {"sliding_window": UNLIMITED - {"0"} | {"None", "(2, 1)"}},
    ),
    "from_block_mask": (
        masks.from_block_mask,
        {"block_mask": create_block_mask(lambda b, h, q, kv: q >= kv, None, None, 8, 8, device="cpu")},
        {"block_mask": set()},
    ),
    "from_key_padding_mask": (
        masks.from_key_padding_mask,
        {"key_padding_mask": torch.zeros(1, 2, dtype=torch.bool)},
        {"key_padding_mask": {"bool tensor"}},
    ),
}
