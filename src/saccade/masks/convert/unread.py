"""Masks of a traced program that depend on the values of tensors, which are read when attention runs.

A compiler traces a program without values, and the program must then be correct for any values and any lengths. Each
class here stands for a mask until the operator of attention runs, which calls `Unread.read`.
"""

from __future__ import annotations

import dataclasses
from abc import abstractmethod
from collections.abc import Callable
from typing import NamedTuple

from torch import Tensor

from saccade.masks.mask import Mask
from saccade.support.errors import unsupported

Shape = tuple[int, int, int, int]
"""(batch, heads, q_len, kv_len) of the attention."""


class AtOrigin(NamedTuple):
    """A mask with the positions of the first query and the first key; further positions are consecutive."""

    mask: Mask
    origin: tuple[int, int]


class Unread(Mask):
    """Base class of masks in a traced program that depend on the values of tensors.

    They support nothing but ``&``, ``|`` and ``~``: a program cannot draw, count or compare what it has not read.
    """

    is_value = False
    is_fact_of_batch = True

    @abstractmethod
    def read(self, shape: Shape) -> Mask | AtOrigin:
        """Return the mask for the values that the tensors hold now. It runs in the operator, not while tracing."""

    @abstractmethod
    def tensors(self) -> tuple[Tensor, ...]: ...

    def allows(self, b: Tensor, h: Tensor, q: Tensor, kv: Tensor) -> Tensor:
        reason = "the mask depends on the values of a tensor, which are read when attention runs"
        raise unsupported("a traced program", [reason], hint="make the mask outside of the compiled function")


def read_mask(mask: Mask, shape: Shape) -> Mask | AtOrigin:
    """Return the mask that ``mask`` stands for; the mask itself unless it is `Unread`."""
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

    def tensors(self) -> tuple[Tensor, ...]:
        return (self.tensor,)


@dataclasses.dataclass(frozen=True, eq=False)
class Converted(Unread):
    """A mask that a function converts from a tensor in a traced program.

    Args:
        function: name of the function, such as "from_attention_mask"; see `_functions`.
        tensor: its first argument.
        rule: its argument ``rule``, the mask within each document; None if it has none.
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
        """True if positions in ``rule`` count from the start of each document."""
        return self.function in _DOCUMENTS

    def within(self, pattern: Mask) -> Converted:
        """Return the mask with a pattern added to the rule within each document."""
        return Converted(self.function, self.tensor, pattern if self.rule is None else pattern & self.rule)

    def read(self, shape: Shape) -> Mask:
        function = _functions()[self.function]
        mask: Mask = function(self.tensor, self.rule) if self.separates_documents else function(self.tensor)
        return mask

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
