"""The mask functions of transformers as masks: known ones by their structure, any other by asking it."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from saccade.integrations.lazy_mask import Placed
from saccade.integrations.tensor_masks import both
from saccade.masks import Causal, Coarse, Documents, Full, Mask, Predicate, Window, from_key_padding_mask

__all__ = ["MaskFunction", "as_rule", "place"]

MaskFunction = Callable[..., Tensor]
"""``(batch_idx, head_idx, q_idx, kv_idx) -> bool`` of absolute positions, which is what our masks are."""

_HOME = "transformers.masking_utils"


def place(
    mask_function: MaskFunction,
    attention_mask: Tensor | None,
    *,
    q_length: int,
    kv_length: int,
    q_offset: int | Tensor = 0,
    kv_offset: int = 0,
    one_by_one: bool = False,
) -> Placed:
    """Turn what a model asks of its mask interface into a rule and positions.

    Args:
        mask_function: the pattern.
        attention_mask: bool ``[batch, tokens]``, True at tokens; None for no padding.
        q_length, kv_length, q_offset, kv_offset: where queries and keys stand.
        one_by_one: whether the function may be asked for single pairs only (a user's own function).

    Raises:
        ValueError: documents or padding of a shape that does not fit.
    """
    start = int(q_offset)
    q, kv = range(start, start + q_length), range(kv_offset, kv_offset + kv_length)
    rule = as_rule(mask_function, one_by_one=one_by_one)
    if attention_mask is not None and (attention_mask.shape[1] < kv.stop or not bool(attention_mask.all())):
        rule = both(rule, from_key_padding_mask(~attention_mask.bool()))
    return Placed(rule, q, kv)


def as_rule(function: MaskFunction, *, one_by_one: bool = False) -> Mask:
    """A mask function of transformers as a mask.

    Args:
        function: what a model hands to its mask interface.
        one_by_one: ask functions that are not known for single pairs, as ``torch.vmap`` does.

    Cost: a known pattern costs nothing and keeps its structure. Any other function becomes a `Predicate`: exact, and
    asked for every pair, a few rows at a time.
    """
    name, held = _name(function), _held(function)
    rule: Mask
    if name == "causal_mask_function":
        rule = Causal()
    elif name == "bidirectional_mask_function":
        rule = Full()
    elif name == "and_masks.and_mask":
        rule = _all_of(held["mask_functions"], one_by_one)
    elif name == "or_masks.or_mask":
        parts = [as_rule(part, one_by_one=one_by_one) for part in held["mask_functions"]]
        rule = parts[0]
        for part in parts[1:]:
            rule = rule | part
    elif name == "sliding_window_overlay.inner_mask":
        rule = Window(int(held["sliding_window"]) - 1, None)
    elif name == "sliding_window_bidirectional_overlay.inner_mask":
        rule = Window(int(held["sliding_window"]), int(held["sliding_window"]))
    elif name == "chunked_overlay.inner_mask" and not bool(held["left_padding"].any()):
        rule = Coarse(Window(0, 0), int(held["chunk_size"]))
    elif name == "packed_sequence_mask_function.inner_mask":
        rule = Documents(_lengths(held["packed_sequence_mask"]))
    else:
        rule = Predicate(_OneByOne(function) if one_by_one else function)
    return rule


@dataclasses.dataclass(frozen=True)
class _OneByOne:
    """A function of four numbers, asked for many at once."""

    function: MaskFunction

    def __call__(self, b: Tensor, h: Tensor, q: Tensor, kv: Tensor) -> Tensor:
        # indexing by numbers under vmap; brings the compiler along
        from torch._dynamo._trace_wrapped_higher_order_op import TransformGetItemToIndex  # noqa: PLC0415

        numbers = torch.broadcast_tensors(b, h, q, kv)
        with TransformGetItemToIndex():
            allowed = torch.vmap(self.function)(*(x.reshape(-1) for x in numbers))
        return allowed.reshape(numbers[0].shape)


def _all_of(functions: tuple[MaskFunction, ...], one_by_one: bool) -> Mask:
    packed = _documents(functions, one_by_one)
    if packed is not None:
        return packed
    rule: Mask = Full()
    for function in functions:
        rule = both(rule, as_rule(function, one_by_one=one_by_one))
    return rule


def _documents(functions: tuple[MaskFunction, ...], one_by_one: bool) -> Mask | None:
    """Packed sequences: the same document, and a rule that counts from its start."""
    if [_name(function) for function in functions] != [
        "packed_sequence_mask_function.inner_mask",
        "remap_positions_for_packed_sequence.inner_mask",
    ]:
        return None
    documents, remapped = (_held(function) for function in functions)
    number, positions = documents["packed_sequence_mask"], remapped["position_ids"]
    starts = torch.cat([torch.ones_like(number[:, :1]), number.diff(dim=1)], 1) != 0
    place = torch.arange(number.shape[1], device=number.device).expand_as(number)
    first = torch.where(starts, place, 0).cummax(1).values
    if positions.shape != number.shape or not torch.equal(positions, place - first):
        return None  # the documents do not count from 0
    return Documents(_lengths(number), rule=as_rule(remapped["mask_function"], one_by_one=one_by_one))


def _lengths(number: Tensor) -> list[list[int]]:
    """Lengths of the documents from the number of each token's document, ``[batch, tokens]``."""
    return [row.unique_consecutive(return_counts=True)[1].tolist() for row in number]


def _name(function: Any) -> str:
    """Which of transformers' own functions this is, such as ``and_masks.and_mask``; "" for any other."""
    if getattr(function, "__module__", None) != _HOME:
        return ""
    return str(getattr(function, "__qualname__", "")).replace(".<locals>", "")


def _held(function: Any) -> dict[str, Any]:
    """What a function has closed over, by name."""
    cells = getattr(function, "__closure__", None) or ()
    code = getattr(function, "__code__", None)
    return dict(zip(code.co_freevars, (cell.cell_contents for cell in cells), strict=True)) if code else {}
