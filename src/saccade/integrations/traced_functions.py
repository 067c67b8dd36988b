"""Represent transformers' mask functions as data that a compiled or exported program can contain.

transformers builds mask functions as closures over simpler ones. Python code can read the variables of a closure, but
Dynamo cannot while it traces a model. So `install_polyfills` registers replacements for Dynamo to trace: they allow the
same pairs as transformers' functions, and can return a description of themselves as data. Eager code is unaffected.
"""

from __future__ import annotations

import dataclasses
import functools
import importlib
from collections.abc import Callable
from typing import Any, cast

import torch
from torch import Tensor

MaskFunction = Callable[..., Tensor]
"""``(batch_idx, head_idx, q_idx, kv_idx) -> bool`` on absolute positions, like saccade's masks."""

HOME = "transformers.masking_utils"
_FACTORIES = (
    "and_masks",
    "or_masks",
    "sliding_window_overlay",
    "sliding_window_bidirectional_overlay",
    "chunked_overlay",
    "blockwise_overlay",
    "packed_sequence_mask_function",
    "padding_mask_function",
    "remap_positions_for_packed_sequence",
)
_FUNCTIONS = ("causal_mask_function", "bidirectional_mask_function")
_JOINED = ("and_masks", "or_masks")
_DESCRIBE = "made of"  # a traced mask function with this argument returns its description as data


@dataclasses.dataclass(frozen=True, eq=False)
class MaskFunctionData:
    """A transformers mask function represented as data.

    Args:
        name: name of the function, or of the factory that builds it, such as "sliding_window_overlay".
        arguments: the arguments of the factory: numbers, tensors and other mask functions.
    """

    name: str
    arguments: tuple[Any, ...] = ()

    @classmethod
    def of(cls, function: Any) -> MaskFunctionData | None:
        """Represent a mask function as data; return None for a user's function, because a program cannot contain it."""
        if is_polyfill(function):
            made_of: MaskFunctionData | None = function(_DESCRIBE)
            return made_of
        name, _, inner = name_of(function).partition(".")
        if not inner:
            return cls(name) if name in _FUNCTIONS else None
        if name not in _FACTORIES or torch.compiler.is_dynamo_compiling():  # Dynamo does not read closures
            return None
        return factory_data(name, tuple(closure_of(function).values()))  # closure and parameters are alphabetical

    def function(self) -> MaskFunction:
        """Build the mask function that this object describes."""
        function_or_factory: Any = getattr(importlib.import_module(HOME), self.name)
        if self.name in _FUNCTIONS:
            return cast("MaskFunction", function_or_factory)
        parts = [part.function() if isinstance(part, MaskFunctionData) else part for part in self.arguments]
        return cast("MaskFunction", function_or_factory(*parts))


def factory_data(name: str, arguments: tuple[Any, ...]) -> MaskFunctionData | None:
    """Represent the result of a transformers mask factory as data; return None if it contains a user's function."""
    if name in _JOINED and len(arguments) == 1 and isinstance(arguments[0], tuple):
        arguments = arguments[0]
    is_joined = name in _JOINED
    parts = [
        MaskFunctionData.of(part) if is_joined or (name.startswith("remap") and i == 0) else part
        for i, part in enumerate(arguments)
    ]
    for part in parts:
        if part is None:
            return None
    return MaskFunctionData(name, tuple(parts))


def name_of(function: Any) -> str:
    """Return the name of a transformers mask function, such as ``and_masks.and_mask``; "" for other functions."""
    code = getattr(function, "__code__", None)
    if code is None or getattr(function, "__module__", None) != HOME:
        return ""
    return str(code.co_qualname.replace(".<locals>", ""))


def closure_of(function: Any) -> dict[str, Any]:
    """Return the closure variables of a mask function by name."""
    cells = getattr(function, "__closure__", None) or ()
    code = getattr(function, "__code__", None)
    return dict(zip(code.co_freevars, (cell.cell_contents for cell in cells), strict=True)) if code else {}


def is_polyfill(function: Any) -> bool:
    """Return whether a mask function was built by this file's replacements while Dynamo traced a model."""
    code = getattr(function, "__code__", None)
    return code is not None and code.co_name == "_traced_mask_function"


def _describable(name: str, arguments: tuple[Any, ...], formula: MaskFunction) -> Any:
    def _traced_mask_function(batch_idx: Any, head_idx: Any = None, q_idx: Any = None, kv_idx: Any = None) -> Any:
        if isinstance(batch_idx, str):
            return factory_data(name, arguments)
        return formula(batch_idx, head_idx, q_idx, kv_idx)

    return _traced_mask_function


# The functions below have the same signatures as those in transformers.masking_utils, and allow the same pairs.


def _and_masks(*mask_functions: MaskFunction) -> Any:
    def formula(b: Tensor, h: Tensor, q: Tensor, kv: Tensor) -> Tensor:
        allowed = q.new_ones((), dtype=torch.bool)
        for function in mask_functions:
            allowed = allowed & function(b, h, q, kv).to(allowed.device)
        return allowed

    return _describable("and_masks", mask_functions, formula)


def _or_masks(*mask_functions: MaskFunction) -> Any:
    def formula(b: Tensor, h: Tensor, q: Tensor, kv: Tensor) -> Tensor:
        allowed = q.new_zeros((), dtype=torch.bool)
        for function in mask_functions:
            allowed = allowed | function(b, h, q, kv).to(allowed.device)
        return allowed

    return _describable("or_masks", mask_functions, formula)


def _sliding_window_overlay(sliding_window: int) -> Any:
    return _describable("sliding_window_overlay", (sliding_window,), lambda b, h, q, kv: kv > q - sliding_window)


def _sliding_window_bidirectional_overlay(sliding_window: int) -> Any:
    def formula(b: Tensor, h: Tensor, q: Tensor, kv: Tensor) -> Tensor:
        return abs(q - kv) <= sliding_window

    return _describable("sliding_window_bidirectional_overlay", (sliding_window,), formula)


def _chunked_overlay(chunk_size: int, left_padding: Tensor) -> Any:
    def formula(b: Tensor, h: Tensor, q: Tensor, kv: Tensor) -> Tensor:
        return (kv - left_padding[b]) // chunk_size == (q - left_padding[b]) // chunk_size

    return _describable("chunked_overlay", (chunk_size, left_padding), formula)


def _blockwise_overlay(block_sequence_ids: Tensor) -> Any:
    def formula(b: Tensor, h: Tensor, q: Tensor, kv: Tensor) -> Tensor:
        block = block_sequence_ids[b, q]
        return (block == block_sequence_ids[b, kv]) & (block >= 0)

    return _describable("blockwise_overlay", (block_sequence_ids,), formula)


def _packed_sequence_mask_function(packed_sequence_mask: Tensor) -> Any:
    def formula(b: Tensor, h: Tensor, q: Tensor, kv: Tensor) -> Tensor:
        return packed_sequence_mask[b, q] == packed_sequence_mask[b, kv]

    return _describable("packed_sequence_mask_function", (packed_sequence_mask,), formula)


def _padding_mask_function(padding_mask: Tensor) -> Any:
    return _describable("padding_mask_function", (padding_mask,), lambda b, h, q, kv: padding_mask[b, kv])


def _remap_positions_for_packed_sequence(mask_function: MaskFunction, position_ids: Tensor) -> Any:
    def formula(b: Tensor, h: Tensor, q: Tensor, kv: Tensor) -> Tensor:
        return mask_function(b, h, position_ids[b, q], position_ids[b, kv])

    return _describable("remap_positions_for_packed_sequence", (mask_function, position_ids), formula)


@functools.cache
def install_polyfills() -> None:
    """Register this file's functions with Dynamo, once, so that it traces them instead of transformers' own.

    If another library has already registered a replacement for a function, that replacement stays. Compiled programs
    then expand masks built with it to dense masks.
    """
    home = importlib.import_module(HOME)
    for name in _FACTORIES:
        theirs = getattr(home, name, None)
        if theirs is None:  # another version of transformers
            continue
        try:
            torch.compiler.substitute_in_graph(theirs)(globals()[f"_{name}"])
        except (ValueError, TypeError):  # already registered by another library, or different parameters
            continue
