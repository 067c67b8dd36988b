"""Compute statistics in one compiled pass over the matrix, or with a few matrix products, instead of block by block."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from torch import Tensor

from saccade.engine import statistics_from_products
from saccade.engine.inputs import AttentionInputs
from saccade.engine.kernels.kernel import Kernel
from saccade.engine.kernels.native_statistics import NUMBERS, Band, can_sweep, sweep_statistics
from saccade.statistics.statistic import Far, MatrixInfo, Quantity, Statistic


def compute_by_sweep(
    inputs: AttentionInputs, impl: str | Kernel, statistics: Sequence[Statistic[Any, Any]], info: MatrixInfo
) -> dict[int, Any]:
    """Compute the statistics that a compiled pass over the matrix supports, and return their results by index.

    The result is empty if the pass supports no statistic for these inputs.
    """
    formulas = {index: statistic.sweep_formula(info) for index, statistic in enumerate(statistics)}
    quantities = dict.fromkeys(
        quantity for formula in formulas.values() if formula is not None for quantity in formula.quantities
    )
    far = next((quantity for quantity in quantities if isinstance(quantity, Far)), Far(0))  # one offset per pass
    bands = [quantity for quantity in quantities if isinstance(quantity, Band)]
    numbers: dict[Quantity, Tensor] = {}
    if quantities and can_sweep(inputs, impl):
        rows, received = sweep_statistics(inputs, bands, far.ahead)
        numbers = {**dict(zip((*NUMBERS[:-1], far, *bands), rows, strict=True)), "received": received}
    elif (
        (names := statistics_from_products.NAMES.intersection(quantities))
        and not inputs.query.is_cpu
        and statistics_from_products.can_use_products(inputs, impl)
    ):
        numbers.update(statistics_from_products.statistics_from_products(inputs, impl, names))
        if "received" in numbers:
            numbers["received"] = numbers["received"].to(info.sum_dtype)
    return {
        index: formula.formula(*(numbers[quantity] for quantity in formula.quantities))
        for index, formula in formulas.items()
        if formula is not None and all(quantity in numbers for quantity in formula.quantities)
    }
