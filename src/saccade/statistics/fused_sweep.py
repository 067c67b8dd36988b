"""Sweep: numbers of rows and columns that compiled code finds in one go, and questions that are answered from them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

from torch import Tensor

from saccade.engine import statistics_from_products
from saccade.engine.inputs import AttentionInputs
from saccade.engine.kernels.kernel import Kernel
from saccade.engine.kernels.native_statistics import NUMBERS, Band, can_look, look

if TYPE_CHECKING:
    from saccade.statistics.fold import Fold, Outline

__all__ = ["Band", "Far", "Quantity", "Swept", "answers_by_sweep"]


class Far(NamedTuple):
    """Mean distance, where query i stands so many positions ahead of key i."""

    ahead: int


Quantity = str | Far | Band
"""One number a row: one of `NUMBERS`, a distance, the sum of a band; or "received", one number a key."""


class Swept(NamedTuple):
    """How a question is answered from what a sweep finds.

    Attributes:
        asks: what it needs.
        answer: makes the answer of it: tensors ``[batch, heads, q_len]``, or float64 ``[batch, heads, kv_len]`` of
            keys, which are not its own to keep.
    """

    asks: tuple[Quantity, ...]
    answer: Callable[..., Any]


def answers_by_sweep(
    inputs: AttentionInputs, impl: str | Kernel, folds: Sequence[Fold[Any, Any]], outline: Outline
) -> dict[int, Any]:
    """Answers to those questions that one compiled sweep can answer, by their place; none where it cannot run."""
    asked = {place: own for place, fold in enumerate(folds) if (own := fold.by_sweep(outline)) is not None}
    quantities = dict.fromkeys(quantity for own in asked.values() for quantity in own.asks)
    far = next((quantity for quantity in quantities if isinstance(quantity, Far)), Far(0))  # one way to stand a sweep
    bands = [quantity for quantity in quantities if isinstance(quantity, Band)]
    found: dict[Quantity, Tensor] = {}
    if asked and can_look(inputs, impl):
        rows, received = look(inputs, bands, far.ahead)
        found = {**dict(zip((*NUMBERS[:-1], far, *bands), rows, strict=True)), "received": received}
    elif (
        (named := statistics_from_products.NAMES.intersection(quantities))
        and not inputs.query.is_cpu
        and statistics_from_products.can_ask(inputs, impl)
    ):
        found.update(statistics_from_products.numbers(inputs, impl, named))
        if "received" in found:
            found["received"] = found["received"].to(outline.sum_dtype)
    return {
        place: own.answer(*(found[quantity] for quantity in own.asks))
        for place, own in asked.items()
        if all(quantity in found for quantity in own.asks)
    }
