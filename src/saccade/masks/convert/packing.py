"""Pack sequences of different lengths into one batch item without padding, and unpack the results."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from saccade.masks import Documents, Mask
from saccade.support.argument_hints import argument_hints
from saccade.support.errors import kind, type_error, value_error
from saccade.support.validation import check_type
from saccade.tasks import IGNORED


class Packed(NamedTuple):
    """Sequences packed one after another as one batch item.

    Attributes:
        tokens: the packed tensors ``[1, total, ...]``, the input of layers.
        lengths: lengths of the sequences.
    """

    tokens: Tensor
    lengths: tuple[int, ...]

    @property
    def cu_seqlens(self) -> Tensor:
        """Boundaries of packed sequences, int32 ``[sequences + 1]``: 0 and the end positions, as in FlashAttention."""
        ends = torch.tensor((0, *self.lengths)).cumsum(0)
        return ends.to(self.tokens.device, torch.int32)

    @property
    def position_ids(self) -> Tensor:
        """Positions within each packed sequence, int64 ``[1, total]``, for position embeddings."""
        return torch.cat([torch.arange(length) for length in self.lengths])[None].to(self.tokens.device)

    def targets(self) -> Tensor:
        """Return the token that follows each token, int64 ``[1, total]``, and -100 for the last token of each sequence.

        Losses in torch ignore -100, so no sequence is trained to predict the first token of the next one. The targets
        belong to the logits at the same positions; for models that shift labels themselves, use `labels`.

        Raises:
            TypeError: the packed tensors are not token ids, ints ``[length]``.

        Example:
            >>> pack([torch.tensor([5, 6, 7]), torch.tensor([8, 9])]).targets()
            tensor([[   6,    7, -100,    9, -100]])
        """
        self._check_token_ids()
        targets = self.tokens.long().roll(-1, 1)
        return targets.index_fill_(1, self.cu_seqlens[1:].long()[self.cu_seqlens.diff() > 0] - 1, IGNORED)

    def labels(self) -> Tensor:
        """Return the token ids, int64 ``[1, total]``, with -100 for the first token of each sequence.

        Pass them as ``labels`` to models that shift labels themselves, like the models in transformers. See `targets`.

        Raises:
            TypeError: the packed tensors are not token ids, ints ``[length]``.

        Example:
            >>> pack([torch.tensor([5, 6, 7]), torch.tensor([8, 9])]).labels()
            tensor([[-100,    6,    7, -100,    9]])
        """
        self._check_token_ids()
        return self.tokens.long().masked_fill(self.position_ids == 0, IGNORED)

    def _check_token_ids(self) -> None:
        if self.tokens.dim() != 2 or self.tokens.is_floating_point() or self.tokens.is_complex():
            got = f"{list(self.tokens.shape)} {self.tokens.dtype}"
            raise type_error("packed", "contain token ids, ints [1, total]", got)

    def mask(self, rule: Mask | None = None) -> Documents:
        """Return the mask that separates the packed sequences. ``rule`` counts positions from each sequence's start."""
        return Documents(self.lengths, rule)

    def unpack(self, packed: Tensor, dim: int = 1) -> tuple[Tensor, ...]:
        """Split a result for packed sequences into one tensor ``[length, ...]`` per sequence.

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


@argument_hints({}, texts="a list of tensors [length, ...]")
def pack(texts: Sequence[Tensor]) -> Packed:
    """Pack sequences into one batch item, so that no time is spent on padding.

    With ``attention(q, k, v, packed.mask(Causal()))``, or in layers called with ``mask=packed.mask()``, each sequence
    is processed as if it were alone: the pattern of a layer, and a mask passed to ``packed.mask``, count positions from
    the start of each sequence. (A mask joined by ``&`` counts from the start of the packed row.)

    Args:
        texts: tensors ``[length, ...]`` that differ only in their lengths.

    Raises:
        TypeError: ``texts`` is not a list of tensors.
        ValueError: there are no tensors, or their widths, dtypes or devices differ.

    Example:
        >>> packed = pack([torch.ones(2, 8), torch.zeros(3, 8)])
        >>> packed.tokens.shape, packed.cu_seqlens.tolist()
        (torch.Size([1, 5, 8]), [0, 2, 5])
        >>> [text.shape[0] for text in packed.unpack(packed.tokens)]
        [2, 3]
    """
    if isinstance(texts, Tensor) or not isinstance(texts, Sequence):
        hint = "[x[:n] for x, n in zip(batch, lengths)] splits a padded batch"
        raise type_error("texts", "be a list of tensors [length, ...]", kind(texts), hint=hint)
    if not texts:
        raise value_error("texts", "contain at least one tensor", "none")
    first = check_type("texts", texts[0], Tensor, "contain tensors")
    for text in texts:
        check_type("texts", text, Tensor, "contain tensors")
        if text.dim() == 0 or (text.shape[1:], text.dtype, text.device) != (first.shape[1:], first.dtype, first.device):
            got = f"{list(text.shape)} {text.dtype} and {list(first.shape)} {first.dtype}"
            raise value_error("texts", "differ only in length, [length, ...]", got)
    return Packed(torch.cat(list(texts))[None], tuple(len(text) for text in texts))
