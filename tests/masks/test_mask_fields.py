"""Masks refuse arguments of wrong types and sizes with an error, and accept all others.

Every argument of every mask and recipe is tried with every value of one list, against a table of accepted values.
"""

import functools
import operator
import re
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch.nn.attention.flex_attention import create_block_mask

import saccade as sc
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

# What each kind of argument takes, by the names above.
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

# By name: the function, arguments that are right, and what each of them takes.
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
        {"block": SIZES, "length": SIZES - {"2**35"}},
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

_SENTENCE = re.compile(r"(?P<where>[\w.]+): (?P<argument>.+?) must (?P<rule>.+); got (?P<got>.+)\.")


def _outcome(name: str, argument: str, call: Callable[[], Any]) -> str:
    """What a call gives: "taken" if what it makes answers, "refused" with a sentence of ours, or else the sentence."""
    try:
        mask = call()
    except (ValueError, TypeError, sc.UnsupportedError) as refusal:
        line = str(refusal).splitlines()[0]
        found = _SENTENCE.fullmatch(line)
        is_ours = found and found["where"] == name and argument in found["argument"].replace(",", "").split()
        is_short = len(line) < 200 and not re.search(r"\b(tensor|array)\(", line)
        return "refused" if is_ours and is_short else line
    _answers(mask)
    return "taken"


def _answers(mask: masks.Mask) -> None:
    """It can be asked, also by way of its plan, and has a name."""
    assert str(mask)
    if any(tensor.is_meta for tensor in mask.tensors()):
        assert mask.shape == (1, 1)
    else:
        dense = mask.to_dense(5)
        assert dense.dtype == torch.bool
        assert mask.density(5) == pytest.approx(dense.double().mean().item())


@pytest.mark.parametrize(
    "name, argument", [(name, argument) for name, (_, _, taken) in CONSTRUCTORS.items() for argument in taken]
)
def test_an_argument_is_taken_or_refused(name: str, argument: str) -> None:
    constructor, right, taken = CONSTRUCTORS[name]
    where = name.partition(",")[0]
    outcomes = {
        value: _outcome(where, argument, lambda make=make: constructor(**(right | {argument: make()})))  # type: ignore[misc]
        for value, make in VALUES.items()
    }
    assert outcomes == {value: "taken" if value in taken[argument] else "refused" for value in VALUES}


# The methods of a mask that tells two batch items and three heads apart, and what their arguments take.
_TWO_BY_THREE = masks.Dense(torch.ones(2, 3, 5, 5, dtype=torch.bool))
_LENGTHS = {"0", "1", "3", "np.int64"}
METHODS: dict[str, tuple[dict[str, Any], dict[str, set[str]]]] = {
    "to_dense": (
        {"q_len": 2},
        {
            "q_len": _LENGTHS,
            "kv_len": _LENGTHS | {"None"},
            "batch": {"0", "1", "None"},
            "heads": {"0", "1", "3", "np.int64", "None"},
            "q_positions": {"(2, 1)", "int tensor", "int tensor, 2-D", "negative tensor", "None"},
            "kv_positions": {"(2, 1)", "int tensor", "int tensor, 2-D", "negative tensor", "None"},
        },
    ),
    "plan": (
        {"q_len": 2},
        {"q_len": _LENGTHS, "kv_len": _LENGTHS | {"None"}, "batch": {"0", "1", "None"}, "heads": _LENGTHS},
    ),
    "density": (
        {"q_len": 2},
        {
            "q_len": _LENGTHS,
            "kv_len": _LENGTHS | {"None"},
            "batch": {"0", "1", "None"},
            "heads": {"0", "1", "3", "np.int64", "None"},
        },
    ),
    "picture": (
        {"q_len": 2},
        {"q_len": _LENGTHS, "kv_len": _LENGTHS | {"None"}, "batch": {"0", "1"}, "head": {"0", "1"}},
    ),
}
_HUGE = {"2**21", "2**35"}  # for lengths: no mistake, but more than is to be computed here


@pytest.mark.parametrize(
    "name, argument", [(name, argument) for name, (_, taken) in METHODS.items() for argument in taken]
)
def test_an_argument_of_a_method_is_taken_or_refused(name: str, argument: str) -> None:
    right, taken = METHODS[name]
    values = {value: make for value, make in VALUES.items() if value not in _HUGE or name == "picture"}
    outcomes = {}
    for value, make in values.items():
        call = functools.partial(getattr(_TWO_BY_THREE, name), **(right | {argument: make()}))
        try:
            call()
            outcomes[value] = "taken"
        except (ValueError, TypeError) as refusal:
            found = _SENTENCE.fullmatch(str(refusal).splitlines()[0])
            is_ours = found and found["where"] == f"Dense.{name}" and argument in found["argument"].split()
            outcomes[value] = "refused" if is_ours else str(refusal)
    assert outcomes == {value: "taken" if value in taken[argument] else "refused" for value in values}


@pytest.mark.parametrize("value", [5, True, None, "abc", {1}, torch.ones(2, 2, dtype=torch.bool), masks.Causal])
@pytest.mark.parametrize("sign", ["&", "|"])
def test_only_masks_are_joined(value: Any, sign: str) -> None:
    join = operator.and_ if sign == "&" else operator.or_
    for call in (lambda: join(masks.Causal(), value), lambda: join(value, masks.Causal())):
        with pytest.raises(TypeError, match=rf"Causal: \{sign} must join two masks; got .+\."):
            call()


@pytest.mark.parametrize(
    "answer, got",
    [(lambda q: 1, "int"), (lambda q: None, "NoneType"), (lambda q: q, "int64"), (lambda q: q.float(), "float32")],
)
def test_a_function_answers_with_a_bool_tensor(answer: Callable[[torch.Tensor], Any], got: str) -> None:
    mask = masks.Predicate(lambda b, h, q, kv: answer(q))
    rule = f"Predicate: function must answer with a bool tensor, True = may attend; got {got}\\."
    with pytest.raises(TypeError, match=rule):
        mask.to_dense(3)
    x = torch.zeros(1, 1, 3, 8)
    with pytest.raises(TypeError, match=rule):
        sc.attention(x, x, x, mask=mask)


def test_classes_are_refused_as_masks() -> None:
    with pytest.raises(TypeError, match=r"attention: mask must be None, .*; got the class Causal\."):
        sc.attention(*[torch.zeros(1, 1, 3, 8)] * 3, mask=masks.Causal)


@pytest.mark.parametrize("shape", [None, 5, (1, 2, 3), [1, 1, 3, 3], "abcd", torch.ones(4)])
def test_a_mask_is_made_to_fit_four_sizes(shape: Any) -> None:
    with pytest.raises(TypeError, match=r"as_mask: shape must be a tuple \(batch, heads, q_len, kv_len\); got .+\."):
        masks.as_mask(None, shape)


def test_sums_and_products_of_sizes_stay_within_what_is_counted() -> None:
    with pytest.raises(ValueError, match=r"Axial: height and width must make fewer than 2\*\*40 cells; got 1048576"):
        masks.Axial(2**20, 2**20)
    with pytest.raises(ValueError, match=r"bigbird: global_blocks must hold fewer than 2\*\*20 tokens; got 2 of 5242"):
        masks.bigbird(2**19)
    with pytest.raises(ValueError, match=r"Documents: lengths must add up to less than 2\*\*31; got \[\[1073741824"):
        masks.Documents([2**30, 2**30])


def test_errors_shorten_long_lists_and_tensors() -> None:
    with pytest.raises(ValueError, match=r"got \[0, 1, 2, 3, 4, 5, \.\.\.\]\.$"):
        masks.Padding([*range(1000), -1])
    with pytest.raises(ValueError, match=r"Padding: lengths must .*; got tensor \[3\] float32\.") as refused:
        masks.Padding(torch.full((3,), 7.0))
    assert "7" not in str(refused.value)


def test_every_mask_and_recipe_is_in_the_table() -> None:
    tried = {constructor for constructor, _, _ in CONSTRUCTORS.values()}
    without_sizes = {masks.Mask, masks.Full, masks.Causal, masks.as_mask, masks.parse}
    assert {getattr(masks, name) for name in masks.__all__} <= tried | without_sizes
