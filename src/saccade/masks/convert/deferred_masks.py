"""Masks in a traced program that depend on tensor values. The values are read when attention runs.

A compiler traces a program without values, and the program must then be correct for any values and any lengths. Each
class here stands in for a mask until the attention operator runs and calls `Unread.read`.
"""

from __future__ import annotations

import dataclasses
from abc import abstractmethod
from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor

from saccade.masks.mask import Mask

Shape = tuple[int, int, int, int]
"""(batch, heads, q_len, kv_len) of the attention."""


class Pairs(NamedTuple):
    """Query-key pairs, as broadcastable int64 tensors: batch items, heads, query indices and key indices."""

    b: Tensor
    h: Tensor
    q: Tensor
    kv: Tensor


class AtOrigin(NamedTuple):
    """A mask, and the positions of the first query and the first key. All other positions are consecutive."""

    mask: Mask
    origin: tuple[int, int]


class Unread(Mask):
    """Base class of masks in a traced program that depend on the values of tensors.

    Before its values are read, such a mask cannot be planned, drawn or counted. `allows` and `at_indices` become
    operations of the program.
    """

    is_value = False
    is_fact_of_batch = True

    @abstractmethod
    def read(self, shape: Shape) -> Mask | AtOrigin:
        """Return the mask for the current values of its tensors. The attention operator calls this after tracing."""

    @abstractmethod
    def tensors(self) -> tuple[Tensor, ...]: ...

    def at_indices(self, pairs: Pairs, shape: Shape) -> Tensor:
        """Return which of the pairs the mask allows at default positions, without reading values."""
        return self.allows(pairs.b, pairs.h, pairs.q + (shape[3] - shape[2]), pairs.kv)


def read_mask(mask: Mask, shape: Shape) -> Mask | AtOrigin:
    """Return the mask for which an `Unread` mask is a placeholder. Return other masks unchanged."""
    return mask.read(shape) if isinstance(mask, Unread) else mask


@dataclasses.dataclass(frozen=True, eq=False)
class TensorMask(Unread):
    """A bool tensor passed as a mask to attention in a traced program.

    Args:
        tensor: bool, of any shape that `saccade.masks.as_mask` accepts.
    """

    tensor: Tensor

    def read(self, shape: Shape) -> Mask:
        from saccade.masks.convert.as_mask import as_mask  # noqa: PLC0415  as_mask makes objects of this class

        return as_mask(self.tensor, shape)

    def allows(self, b: Tensor, h: Tensor, q: Tensor, kv: Tensor) -> Tensor:
        from saccade.masks.rules.dense import Dense  # noqa: PLC0415  it imports the module of the base class

        return Dense(self.tensor).allows(b, h, q, kv)

    def at_indices(self, pairs: Pairs, shape: Shape) -> Tensor:
        return self.tensor[:, None] if self.tensor.dim() == 3 else self.tensor

    def tensors(self) -> tuple[Tensor, ...]:
        return (self.tensor,)


@dataclasses.dataclass(frozen=True, eq=False)
class Converted(Unread):
    """A placeholder for the result of a function that converts a tensor to a mask, in a traced program.

    Args:
        function: name of the function, such as "from_attention_mask"; see `_functions`.
        tensor: first argument of the function.
        rule: argument ``rule`` of the function, the mask within each document; None if the function has none.
    """

    function: str
    tensor: Tensor
    rule: Mask | None = None

    @property
    def made_of(self) -> tuple[Mask, ...]:
        return () if self.rule is None else (self.rule,)

    @property
    def shape(self) -> tuple[int, int]:
        return (1, 1)  # not known while tracing

    @property
    def is_causal(self) -> bool:
        return self.rule is not None and self.rule.is_causal

    @property
    def separates_documents(self) -> bool:
        """Whether positions in ``rule`` count from the start of each document."""
        return self.function in _DOCUMENTS

    def within(self, pattern: Mask) -> Converted:
        """Return this mask with its rule within each document joined with a pattern by ``&``."""
        return Converted(self.function, self.tensor, pattern if self.rule is None else pattern & self.rule)

    def read(self, shape: Shape) -> Mask:
        function = _functions()[self.function]
        mask: Mask = function(self.tensor, self.rule) if self.separates_documents else function(self.tensor)
        return mask

    def allows(self, b: Tensor, h: Tensor, q: Tensor, kv: Tensor) -> Tensor:
        if self.function == "Padding":
            start, stop = (edge[b % len(edge)] for edge in self.tensor.to(kv.device))
            return (kv >= start) & (kv < stop)
        if not self.separates_documents:
            return self._dense().allows(b, h, q, kv)
        (q_document, q_start), (kv_document, kv_start) = (self._document(b, x) for x in (q, kv))
        together = (q_document == kv_document) & (q_document >= 0)
        return together if self.rule is None else together & self.rule.allows(b, h, q - q_start, kv - kv_start)

    def _dense(self) -> Mask:
        """Return the mask as a `Dense` mask, for functions that convert a token mask or a pair mask."""
        from saccade.masks.rules.dense import Dense  # noqa: PLC0415  it imports the module of the base class

        x = self.tensor
        if x.is_floating_point() and x.dim() == 4:
            return Dense(x > torch.finfo(x.dtype).min / 2)
        allowed = ~x if self.function == "from_key_padding_mask" else x.bool()
        return Dense(allowed[:, None, None, :] if x.dim() == 2 else allowed)

    def _document(self, b: Tensor, positions: Tensor) -> tuple[Tensor, Tensor]:
        """Return the document index of each position (-1 if none) and the start position of that document."""
        x = self.tensor.to(positions.device)
        if self.function == "from_cu_seqlens":
            number = (positions[..., None] >= x[1:]).sum(-1)
            outside = (positions < 0) | (positions >= x[-1])
            return number.masked_fill(outside, -1), x[number.clamp(max=x.shape[0] - 1)]
        if self.function == "from_position_ids":
            ids = x if x.dim() == 2 else x[None]
            row, column = b % ids.shape[0], positions.clamp(0, ids.shape[1] - 1)
            outside = (positions < 0) | (positions >= ids.shape[1])
            number = (ids == 0).cumsum(1)[row, column]
            return number.masked_fill(outside, -1), positions - ids[row, column]
        document, start = x.unbind(0)
        row, column = b % document.shape[0], (positions + 1).clamp(0, document.shape[1] - 1)
        return document[row, column], start[row, column]

    def tensors(self) -> tuple[Tensor, ...]:
        return (self.tensor, *(() if self.rule is None else self.rule.tensors()))


_DOCUMENTS = ("from_cu_seqlens", "from_position_ids", "Documents")


def _functions() -> dict[str, Callable[..., Mask]]:
    """Return the functions that convert a tensor to a mask, by name."""
    from saccade.masks.convert import interop  # noqa: PLC0415  it makes objects of this file's classes
    from saccade.masks.rules.documents import documents_of_table  # noqa: PLC0415  likewise
    from saccade.masks.rules.padding import padding_of_table  # noqa: PLC0415  likewise

    names = ("from_attention_mask", "from_key_padding_mask", "from_cu_seqlens", "from_position_ids")
    return {
        **{name: getattr(interop, name) for name in names},
        "Documents": documents_of_table,
        "Padding": padding_of_table,
    }
