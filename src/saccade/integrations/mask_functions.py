"""Convert transformers' mask functions to masks or to dense tensors; known functions keep their structure."""

from __future__ import annotations

import dataclasses
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from saccade.integrations.lazy_mask import Placed
from saccade.integrations.tensor_masks import both
from saccade.integrations.traced_functions import MaskFunction, closure_of, name_of
from saccade.masks import Causal, Coarse, Documents, Full, Mask, Predicate, Window, from_key_padding_mask
from saccade.support.numerics import any_true


def placed_rule(
    mask_function: MaskFunction,
    attention_mask: Tensor | None,
    *,
    q_length: int,
    kv_length: int,
    q_offset: int | Tensor = 0,
    kv_offset: int = 0,
    one_by_one: bool = False,
) -> Placed:
    """Convert the arguments of transformers' mask interface to a mask rule with token positions.

    Args:
        mask_function: the model's pattern.
        attention_mask: bool ``[batch, tokens]``, True at tokens; None for no padding. Keys past its end are masked.
        q_length, kv_length: numbers of queries and keys.
        q_offset, kv_offset: positions of the first query and of the first key.
        one_by_one: whether the function accepts only one pair at a time, as some users' functions do.

    Raises:
        ValueError: the documents or the padding have the wrong shape.
    """
    start = int(q_offset)
    q, kv = range(start, start + q_length), range(kv_offset, kv_offset + kv_length)
    rule = as_rule(mask_function, one_by_one=one_by_one)
    placed = Placed(rule, q, kv, texts=_texts_of(rule))
    return placed if attention_mask is None else with_padding(placed, attention_mask.bool())


def dense_mask(
    function: MaskFunction,
    is_token: Tensor | None,
    lengths: tuple[int, int],
    offsets: tuple[int | Tensor, int],
    batch: int,
    device: torch.device | str,
    one_by_one: bool = False,
) -> Tensor:
    """Return the pairs that a mask function of transformers allows, bool ``[batch, 1, q_len, kv_len]``."""
    from transformers.masking_utils import sdpa_mask  # noqa: PLC0415  imported when used

    make: Any = sdpa_mask  # its annotations are narrower than its documentation
    allowed: Tensor = make(
        batch_size=batch,
        q_length=lengths[0],
        kv_length=lengths[1],
        q_offset=offsets[0],
        kv_offset=offsets[1],
        mask_function=function,
        attention_mask=is_token,
        allow_is_causal_skip=False,
        use_vmap=one_by_one,
        device=device,
    )
    return allowed


def with_padding(placed: Placed, is_token: Tensor) -> Placed:
    """Combine a mask rule with padding, and store the number of padding tokens before each sequence.

    Args:
        placed: a mask rule and the token positions.
        is_token: bool ``[batch, tokens]``, True at tokens. Keys past its end are masked.
    """
    rule = placed.rule
    is_token = F.pad(is_token, (0, max(placed.kv_positions.stop - is_token.shape[1], 0)))
    if not any_true(~is_token):
        return placed
    # Causal sequences count positions from their first token, bidirectional sequences from the first column.
    before = (is_token.cumsum(1) == 0).sum(1).tolist() if rule.is_causal and placed.texts is None else ()
    padded = both(rule, from_key_padding_mask(~is_token))
    return placed._replace(rule=padded, left_padding=tuple(before) if any(before) else None)


def as_rule(function: MaskFunction, *, one_by_one: bool = False) -> Mask:
    """Convert a mask function of transformers to a mask.

    Args:
        function: the function that a model passes to its mask interface.
        one_by_one: whether to call unknown functions with one pair at a time, using ``torch.vmap``.

    Cost: a known pattern costs nothing and keeps its structure. Any other function becomes a `Predicate`, which is
    exact and evaluated for every pair, a few rows at a time. An empty window or chunk also becomes a `Predicate`,
    because `Window` and `Coarse` do not support it; some configurations contain an empty window that no layer uses.
    """
    name, closure = name_of(function), closure_of(function)
    rule: Mask
    if name == "causal_mask_function":
        rule = Causal()
    elif name == "bidirectional_mask_function":
        rule = Full()
    elif name == "and_masks.and_mask":
        rule = _all_of(closure["mask_functions"], one_by_one)
    elif name == "or_masks.or_mask":
        parts = [as_rule(part, one_by_one=one_by_one) for part in closure["mask_functions"]]
        rule = parts[0]
        for part in parts[1:]:
            rule = rule | part
    elif name == "sliding_window_overlay.inner_mask" and closure["sliding_window"] >= 1:
        rule = Window(int(closure["sliding_window"]) - 1, None)
    elif name == "sliding_window_bidirectional_overlay.inner_mask" and closure["sliding_window"] >= 0:
        rule = Window(int(closure["sliding_window"]), int(closure["sliding_window"]))
    elif (
        name == "chunked_overlay.inner_mask" and closure["chunk_size"] >= 1 and not bool(closure["left_padding"].any())
    ):
        rule = Coarse(Window(0, 0), int(closure["chunk_size"]))
    elif name == "packed_sequence_mask_function.inner_mask":
        rule = Documents(_document_lengths(closure["packed_sequence_mask"]))
    else:
        rule = Predicate(_VmappedFunction(function) if one_by_one else function)
    return rule


@dataclasses.dataclass(frozen=True)
class _VmappedFunction:
    """A mask function for scalar indices, wrapped in ``torch.vmap`` to accept tensors of indices."""

    function: MaskFunction

    def __call__(self, b: Tensor, h: Tensor, q: Tensor, kv: Tensor) -> Tensor:
        # supports tensor indices under vmap; this imports the compiler
        from torch._dynamo._trace_wrapped_higher_order_op import TransformGetItemToIndex  # noqa: PLC0415

        indices = torch.broadcast_tensors(b, h, q, kv)
        with TransformGetItemToIndex():
            allowed = torch.vmap(self.function)(*(x.reshape(-1) for x in indices))
        return allowed.reshape(indices[0].shape)


def _all_of(functions: tuple[MaskFunction, ...], one_by_one: bool) -> Mask:
    packed = _documents(functions, one_by_one)
    if packed is not None:
        return packed
    rule: Mask = Full()
    for function in functions:
        rule = both(rule, as_rule(function, one_by_one=one_by_one))
    return rule


def _documents(functions: tuple[MaskFunction, ...], one_by_one: bool) -> Mask | None:
    """Convert mask functions whose rule restarts in each packed document to a mask; return None for any others."""
    if [name_of(function) for function in functions] != [
        "packed_sequence_mask_function.inner_mask",
        "remap_positions_for_packed_sequence.inner_mask",
    ]:
        return None
    documents, remapped = (closure_of(function) for function in functions)
    ids, positions = documents["packed_sequence_mask"], remapped["position_ids"]
    starts = torch.cat([torch.ones_like(ids[:, :1]), ids.diff(dim=1)], 1) != 0
    index = torch.arange(ids.shape[1], device=ids.device).expand_as(ids)
    first = torch.where(starts, index, 0).cummax(1).values
    if positions.shape != ids.shape or not torch.equal(positions, index - first):
        return None  # positions do not restart at 0 in each document
    rule, lengths = as_rule(remapped["mask_function"], one_by_one=one_by_one), _document_lengths(ids)
    # Traced programs always separate documents, even if each row is a single document.
    return rule if all(len(row) == 1 for row in lengths) else Documents(lengths, rule=rule)


def _texts_of(rule: Mask) -> tuple[tuple[int, ...], ...] | None:
    """Return the lengths of the documents in a mask rule, or None if it contains no documents."""
    if isinstance(rule, Documents):
        return rule.lengths
    return next((texts for texts in map(_texts_of, rule.made_of) if texts is not None), None)


def _document_lengths(ids: Tensor) -> list[list[int]]:
    """Return the lengths of packed documents, given the document index of each token, ``[batch, tokens]``."""
    return [row.unique_consecutive(return_counts=True)[1].tolist() for row in ids]
