"""Texts of different lengths in one line, without padding: packed, and taken apart again."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from saccade.masks import Documents, Mask
from saccade.support.argument_hints import answers
from saccade.support.errors import kind, type_error, value_error
from saccade.support.validation import check_type

__all__ = ["Packed", "pack"]


class Packed(NamedTuple):
    """Texts one behind another, as one batch item.

    Attributes:
        tokens: ``[1, total, ...]``: what was packed, and the input of layers.
        lengths: of the texts.
    """

    tokens: Tensor
    lengths: tuple[int, ...]

    @property
    def cu_seqlens(self) -> Tensor:
        """0, then where each text ends, int32 ``[texts + 1]``, as FlashAttention takes them."""
        ends = torch.tensor((0, *self.lengths)).cumsum(0)
        return ends.to(self.tokens.device, torch.int32)

    @property
    def position_ids(self) -> Tensor:
        """Places in the own text, int64 ``[1, total]``, for tables of positions; masks count for themselves."""
        return torch.cat([torch.arange(length) for length in self.lengths])[None].to(self.tokens.device)

    def mask(self, rule: Mask | None = None) -> Documents:
        """Tokens attend within their own text, to whom the rule allows, on positions of the text."""
        return Documents(self.lengths, rule)

    def unpack(self, packed: Tensor, dim: int = 1) -> tuple[Tensor, ...]:
        """The texts' parts of a result, ``[length, ...]`` each.

        Args:
            packed: ``[1, total, ...]``, or ``[1, heads, total, ...]`` with ``dim=2``.
            dim: the axis of the tokens.
        """
        total = sum(self.lengths)
        check_type("packed", packed, Tensor, "be a tensor")
        if packed.dim() <= dim or packed.shape[0] != 1 or packed.shape[dim] != total:
            rule = f"have shape [1, {'…, ' * (dim - 1)}{total}, …], the tokens on axis {dim}"
            raise value_error("packed", rule, list(packed.shape))
        return tuple(part[0] for part in packed.split(self.lengths, dim))


@answers({}, texts="a list of tensors [length, ...]")
def pack(texts: Sequence[Tensor]) -> Packed:
    """Put texts one behind another, so that no time is spent on padding.

    ``attention(q, k, v, packed.mask(Causal()))``, and layers given ``mask=packed.mask()``, attend within each text as
    if it were alone: a pattern that a layer owns counts positions from the start of each text, as does a rule that is
    given to ``packed.mask``. (What is joined to it by ``&`` counts from the start of the line.)

    Args:
        texts: tensors ``[length, ...]``, alike but for their lengths.

    Raises:
        TypeError: no list of tensors.
        ValueError: no texts, or texts of different widths, dtypes or devices.

    Example:
        >>> packed = pack([torch.ones(2, 8), torch.zeros(3, 8)])
        >>> packed.tokens.shape, packed.cu_seqlens.tolist()
        (torch.Size([1, 5, 8]), [0, 2, 5])
        >>> [text.shape[0] for text in packed.unpack(packed.tokens)]
        [2, 3]
    """
    if isinstance(texts, Tensor) or not isinstance(texts, Sequence):
        hint = "a padded batch is taken apart by [x[:n] for x, n in zip(batch, lengths)]"
        raise type_error("texts", "be a list of tensors [length, ...]", kind(texts), hint=hint)
    if not texts:
        raise value_error("texts", "hold at least one text", "none")
    first = check_type("texts", texts[0], Tensor, "hold tensors")
    for text in texts:
        check_type("texts", text, Tensor, "hold tensors")
        if text.dim() == 0 or (text.shape[1:], text.dtype, text.device) != (first.shape[1:], first.dtype, first.device):
            got = f"{list(text.shape)} {text.dtype} beside {list(first.shape)} {first.dtype}"
            raise value_error("texts", "be alike but for their lengths, [length, ...]", got)
    return Packed(torch.cat(list(texts))[None], tuple(len(text) for text in texts))
