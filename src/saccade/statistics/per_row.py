"""PerRow: questions whose answer is one number a query."""

from __future__ import annotations

from abc import abstractmethod
from typing import NamedTuple

import torch
from torch import Tensor

from saccade.statistics.fold import Fold, Outline
from saccade.statistics.fused_sweep import Quantity, Swept
from saccade.statistics.places import Places
from saccade.statistics.row_block import Block, as_slice
from saccade.support.validation import check_type

__all__ = ["PerRow", "Placing", "RowState", "check_places"]


class RowState(NamedTuple):
    """The rows' answers, ``[batch, heads, q_len, ...]``, and where the tokens stand."""

    values: Tensor
    placing: Placing


class Placing(NamedTuple):
    """Where the tokens stand.

    Attributes:
        places: of all queries and keys.
        first: positions of the first query and the first key, if all follow one by one; None if they do not.
    """

    places: Places
    first: tuple[int, int] | None

    @property
    def offset(self) -> int | None:
        """By how much query i is ahead of key i, if all follow one by one."""
        return None if self.first is None else self.first[0] - self.first[1]

    @classmethod
    def of(cls, places: Places | None, outline: Outline) -> Placing:
        """From places, or bottom-right."""
        if places is None:
            _, _, q_len, kv_len = outline.shape
            q, kv = (torch.arange(first, kv_len, device=outline.device)[None] for first in (kv_len - q_len, 0))
            return cls(Places(q, kv), (kv_len - q_len, 0))
        return cls(places, places.first)


class PerRow(Fold[RowState, Tensor]):
    """A question that each row answers by itself, with one number: ``[batch, heads, q_len]``, 0 for an empty row.

    Attributes:
        places: where the tokens stand, for questions that depend on it; bottom-right when None.
    """

    places: Places | None = None

    def __post_init__(self) -> None:
        check_places(self.places)

    @abstractmethod
    def of_rows(self, block: Block, placing: Placing) -> Tensor:
        """The rows' numbers, ``[batch, heads, rows]``."""

    def of_nothing(self, outline: Outline) -> Tensor:
        """The answers of rows that attend to nothing."""
        return torch.zeros(outline.shape[:3], dtype=outline.dtype, device=outline.device)

    def quantity(self, placing: Placing) -> Quantity | None:
        """What a compiled sweep finds that is the answer; None if nothing is."""
        return None

    def by_sweep(self, outline: Outline) -> Swept | None:
        quantity = self.quantity(Placing.of(self.places, outline))
        return None if quantity is None else Swept((quantity,), Tensor.clone)

    def start(self, outline: Outline) -> RowState:
        return RowState(self.of_nothing(outline), Placing.of(self.places, outline))

    def add(self, state: RowState, block: Block) -> RowState:
        state.values[block.batch, block.heads, as_slice(block.rows)] = self.of_rows(block, state.placing)
        return state

    def merge(self, state: RowState, other: RowState) -> RowState:
        return state._replace(values=state.values + other.values)

    def finish(self, state: RowState) -> Tensor:
        return state.values


def check_places(places: object) -> None:
    """Raise unless these are places, or none."""
    check_type("places", places, (Places, type(None)), "be Places or None", hint="Places.of(A)")
