"""Convert masks from other libraries: attention masks, lengths of packed documents, windows, block masks."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from saccade.masks.convert.deferred_masks import Converted
from saccade.masks.mask import Mask
from saccade.masks.mask_fields import check_readable
from saccade.masks.rules.blocks import Blocks
from saccade.masks.rules.causal import Causal
from saccade.masks.rules.dense import Dense
from saccade.masks.rules.documents import Documents
from saccade.masks.rules.full import Full
from saccade.masks.rules.padding import Padding
from saccade.masks.rules.predicate import Predicate
from saccade.masks.rules.window import Window
from saccade.support.errors import kind, shown, type_error, value_error
from saccade.support.torch_modes import is_tracing
from saccade.support.validation import check_int, check_type, is_integer


def from_key_padding_mask(key_padding_mask: Tensor) -> Mask:
    """Convert a ``key_padding_mask`` for ``nn.MultiheadAttention``, where True means *ignore this key*, to a mask.

    Args:
        key_padding_mask: bool ``[batch, kv_len]``, True at padding. Everywhere else in saccade True means *may attend*;
            only this function inverts a mask.

    Returns:
        `Padding` if the tokens of every item are contiguous at one end, and a `Dense` mask if not.

    Raises:
        TypeError: the argument is not a bool tensor.
        ValueError: the tensor is not two-dimensional, is sparse or nested, or has no values.
    """
    name = "key_padding_mask"
    if not isinstance(key_padding_mask, Tensor) or key_padding_mask.dtype != torch.bool:
        got = str(key_padding_mask.dtype) if isinstance(key_padding_mask, Tensor) else kind(key_padding_mask)
        hint = "True marks padding; pass float masks that are added to scores as bias="
        raise type_error(name, "be a bool tensor", got, hint=hint)
    if key_padding_mask.dim() != 2:
        raise value_error(name, "have shape [batch, kv_len]", list(key_padding_mask.shape))
    check_readable(name, key_padding_mask)
    if is_tracing():
        return Converted("from_key_padding_mask", key_padding_mask)
    return _of_tokens(~key_padding_mask)


def from_attention_mask(attention_mask: Tensor) -> Mask:
    """Convert an ``attention_mask`` from transformers (1 for tokens, 0 for padding) to a mask.

    Only *keys* are masked, so join the mask with the pattern of the model:
    ``Causal() & from_attention_mask(attention_mask)``.

    >>> print(from_attention_mask(torch.tensor([[0, 1, 1], [1, 1, 1]])))
    Padding(lengths=(2, 3), side='left', padded_len=3)

    Args:
        attention_mask: ``[batch, kv_len]`` with values 0 and 1 in any dtype; or the expanded mask of a model,
            ``[batch | 1, heads | 1, q_len, kv_len]``: bool with True = may attend, or float with 0 for allowed
            pairs and -inf (or the lowest number of the dtype) for masked pairs.

    Returns:
        `Padding` if the tokens of every item are contiguous at one end. All other masks, including those with four
        dimensions, become `Dense`.

    Raises:
        TypeError: the argument is not a tensor.
        ValueError: the values or the shape are invalid, or the tensor is sparse, nested or without values.
    """
    name = "attention_mask"
    mask = check_type(name, attention_mask, Tensor, "be a tensor")
    if mask.dim() not in (2, 4):
        rule = "have shape [batch, kv_len] or [batch, heads, q_len, kv_len]"
        raise value_error(name, rule, list(mask.shape))
    check_readable(name, mask)
    if is_tracing():
        return Converted("from_attention_mask", mask)
    if mask.dim() == 2:
        if not bool(((mask == 0) | (mask == 1)).all()):
            hint = "pass terms that are added to scores as bias="
            raise value_error(name, "be 1 at tokens and 0 at padding", _unexpected_value(mask, (0, 1)), hint=hint)
        return _of_tokens(mask.bool())
    if mask.is_floating_point():
        hidden = mask <= torch.finfo(mask.dtype).min / 2
        if not bool((hidden | (mask == 0)).all()):
            hint = "pass terms that are added to scores as bias="
            raise value_error(
                name, "be 0 for visible pairs and the lowest number for hidden pairs", "other values", hint=hint
            )
        return Dense(~hidden)
    if mask.dtype != torch.bool:
        raise value_error(name, "be bool or float with four dimensions", str(mask.dtype), hint="mask.bool()")
    return Dense(mask)


def from_cu_seqlens(cu_seqlens: Tensor, rule: Mask | None = None) -> Documents | Converted:
    """Convert ``cu_seqlens``, the cumulative lengths of packed documents in FlashAttention, to a mask.

    >>> print(from_cu_seqlens(torch.tensor([0, 1, 3]), Causal()).picture(3))
    1 . .
    . 1 .
    . 1 1

    Args:
        cu_seqlens: ints ``[documents + 1]``: 0, then the end of each document.
        rule: the mask within each document, with positions counted from its start; full attention when None.

    Raises:
        TypeError: ``cu_seqlens`` are not ints, or the rule is not a mask.
        ValueError: ``cu_seqlens`` are not one-dimensional, or do not increase from 0.
    """
    name = "cu_seqlens"
    ends = _whole_numbers(name, cu_seqlens)
    if is_tracing():
        return Converted("from_cu_seqlens", ends, _checked_rule(rule))
    if ends.dim() != 1 or not len(ends) or int(ends[0]) != 0 or bool((ends.diff() < 0).any()):
        got = shown(ends.tolist()) if ends.dim() == 1 else list(ends.shape)
        raise value_error(name, "begin with 0 and never decrease, [documents + 1]", got)
    return Documents(ends.diff().tolist(), _checked_rule(rule))


def from_position_ids(position_ids: Tensor, rule: Mask | None = None) -> Documents | Converted:
    """Convert ``position_ids`` that restart at 0 with each packed document to a mask.

    >>> from_position_ids(torch.tensor([[0, 1, 0, 1, 2]])).lengths
    ((2, 3),)

    Args:
        position_ids: ints ``[len]`` or ``[batch, len]``.
        rule: the mask within each document, with positions counted from its start; full attention when None.

    Raises:
        TypeError: ``position_ids`` are not ints, or the rule is not a mask.
        ValueError: positions do not count up from 0 within each document.
    """
    name = "position_ids"
    ids = _whole_numbers(name, position_ids)
    if is_tracing():
        return Converted("from_position_ids", ids, _checked_rule(rule))
    if ids.dim() not in (1, 2) or not ids.numel():
        raise value_error(name, "have shape [len] or [batch, len]", list(ids.shape))
    table = ids.reshape(-1, ids.shape[-1])
    begins = table == 0
    goes_on = torch.ones_like(begins)
    goes_on[:, 1:] = table.diff(dim=1) == 1
    if not bool(begins[:, 0].all()) or not bool((begins | goes_on).all()):
        hint = "for tokens that follow others in a cache, pass q_positions and kv_positions"
        raise value_error(name, "count 0, 1, 2, … from the start of each document", "other positions", hint=hint)
    starts = [row.nonzero()[:, 0].tolist() for row in begins]
    lengths = [[b - a for a, b in zip(row, [*row[1:], table.shape[1]], strict=True)] for row in starts]
    return Documents(lengths, _checked_rule(rule))


def from_sliding_window(sliding_window: int | tuple[int, int] | None) -> Mask:
    """Convert a ``sliding_window`` from transformers or a ``window_size`` from FlashAttention to a mask.

    >>> from_sliding_window(4), from_sliding_window((3, -1))
    (Window(left=3, right=0), Window(left=3, right=None))

    Args:
        sliding_window: number of keys up to and including the query's position (transformers); or numbers of (keys
            before, keys after) the query, where -1 means no limit (FlashAttention); or None for `Causal`.

    Raises:
        TypeError: the argument is not an int, a pair of ints or None.
        ValueError: the size is below 1, or below -1 in a pair.
    """
    name = "sliding_window"
    if sliding_window is None:
        return Causal()
    if isinstance(sliding_window, tuple | list):
        if len(sliding_window) != 2:
            raise value_error(name, "be a number, or a pair (left, right)", shown(sliding_window))
        left, right = (check_int(name, size, -1) for size in sliding_window)
        if left == right == -1:
            return Full()
        return Window(None if left == -1 else left, None if right == -1 else right)
    return Window(check_int(name, sliding_window) - 1, 0)


def from_block_mask(block_mask: Any) -> Mask:
    """Convert a ``BlockMask`` from FlexAttention to a mask that applies its function within its blocks.

    Args:
        block_mask: a result of ``create_block_mask``. Its function counts queries from 0, whereas in the returned mask
            the last query is at the position of the last key.

    Raises:
        TypeError: the argument is not a ``BlockMask``.
    """
    if not all(hasattr(block_mask, name) for name in ("mask_mod", "seq_lengths", "BLOCK_SIZE", "to_dense")):
        hint = "a function (b, h, q, kv) -> bool is already a mask"
        raise type_error("block_mask", "be a BlockMask of FlexAttention", kind(block_mask), hint=hint)
    function, (q_len, kv_len) = block_mask.mask_mod, block_mask.seq_lengths
    ahead = kv_len - q_len

    def shifted(b: Tensor, h: Tensor, q: Tensor, kv: Tensor) -> Tensor:
        allowed: Tensor = function(b, h, q - ahead, kv)
        return allowed

    mask = Predicate(function if ahead == 0 else shifted)
    blocks, (rows, columns) = block_mask.to_dense().bool(), block_mask.BLOCK_SIZE
    # Only square blocks of a single item restrict the mask; in all other cases the function alone defines it.
    if ahead or rows != columns or blocks.shape[0] != 1 or bool(blocks.all()):
        return mask
    return Blocks(blocks[0], rows) & mask


def _checked_rule(rule: Mask | None) -> Mask | None:
    return check_type("rule", rule, (Mask, type(None)), "be a mask or None")


def _of_tokens(is_token: Tensor) -> Mask:
    """Convert ``is_token``, bool ``[batch, kv_len]``, to a padding mask: keys that are not tokens are masked."""
    kv_len = is_token.shape[1]
    lengths = is_token.sum(1)
    index = torch.arange(kv_len, device=is_token.device)
    if lengths.numel() and torch.equal(is_token, index < lengths[:, None]):
        return Padding(lengths)
    if lengths.numel() and torch.equal(is_token, index >= kv_len - lengths[:, None]):
        return Padding(lengths, side="left", padded_len=kv_len)
    return Dense(is_token[:, None, None, :])


def _whole_numbers(name: str, given: object) -> Tensor:
    """Convert lengths or ids from another library (an int tensor or a list of ints) to an int64 tensor."""
    numbers = given
    if isinstance(given, list | tuple) and all(is_integer(x) and abs(int(x)) < 1 << 62 for x in given):
        numbers = torch.tensor([int(x) for x in given], device="cpu")
    is_whole = isinstance(numbers, Tensor) and not (numbers.is_floating_point() or numbers.is_complex())
    if not isinstance(numbers, Tensor) or not is_whole or numbers.dtype == torch.bool:
        got = str(numbers.dtype) if isinstance(numbers, Tensor) else kind(given)
        raise type_error(name, "be a tensor of whole numbers", got)
    check_readable(name, numbers)
    return numbers.long()


def _unexpected_value(mask: Tensor, known: tuple[int, ...]) -> str:
    other = mask[~torch.isin(mask, torch.tensor(known, dtype=mask.dtype, device=mask.device))]
    return str(other[0].item())
