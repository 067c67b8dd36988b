"""UniformBaselines: uniform baselines of recorded statistics, computed once per distinct mask."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from typing import Any

from torch import Tensor

from saccade.engine.inputs import AttentionInputs
from saccade.matrix import AttentionMatrix, Matrix, matrix_from_inputs
from saccade.matrix.uniform_matrix import uniform_inputs
from saccade.statistics import LargestLogit, LargestWeight, PerRow, PositionInformation, Received, Statistic
from saccade.support.errors import UnsupportedError

_REMEMBERED = 8  # maximum number of masks with cached baselines


class UniformBaselines:
    """A cache of uniform baselines of statistics with one number per query, key or head.

    Baselines are cached for masks that can be compared by value. If all batch items and heads share a mask, the
    baseline is computed for just one of them.
    """

    def __init__(self) -> None:
        self._known: dict[Any, tuple[Any, ...]] = {}
        self._lock = threading.Lock()

    def of(self, matrix: Matrix, statistics: Sequence[Statistic[Any, Any]]) -> tuple[tuple[Any, ...], Tensor | None]:
        """Return each statistic's baseline for the mask of a call, and which queries may attend to any key.

        A baseline that is not computed is None. The second value is bool ``[batch, heads, q_len]``, True for queries
        that may attend to a key, or None if no baseline is computed.
        """
        nothing = ((None,) * len(statistics), None)
        wanted = [statistic for statistic in statistics if _has_baseline(statistic)]
        if not wanted:
            return nothing
        wanted.append(LargestWeight())
        inputs = matrix.inputs.current() if isinstance(matrix, AttentionMatrix) else None
        try:
            results = self._of_inputs(inputs, wanted) if inputs is not None else matrix.uniform().compute(*wanted)
        except UnsupportedError:  # no mask is known
            return nothing
        answers = iter(results)
        return tuple(next(answers) if _has_baseline(statistic) else None for statistic in statistics), results[-1] > 0

    def _of_inputs(self, inputs: AttentionInputs, wanted: list[Statistic[Any, Any]]) -> tuple[Any, ...]:
        batch, heads, q_len, kv_len = inputs.shape
        is_shared = inputs.rule.shape[1] == 1 and not inputs.rule.calls_functions
        is_single_item = is_shared and inputs.rule.shape[0] == 1 and all(map(_is_same_for_all_items, wanted))
        shape = (1 if is_single_item else batch, 1 if is_shared else heads, q_len, kv_len)
        is_value = inputs.rule.is_value and not inputs.rule.calls_functions  # equal masks allow the same pairs
        key = (inputs.rule, shape, inputs.origin, inputs.dtype, inputs.device) if is_value else None
        with self._lock:
            results = None if key is None else self._known.get(key)
        if results is None:
            uniform = uniform_inputs(inputs)
            query, keys = uniform.query[: shape[0], : shape[1]], uniform.key[: shape[0]]
            keys = keys[:, :1] if is_shared else keys
            results = matrix_from_inputs(uniform.replaced(shape=shape, query=query, key=keys)).compute(*wanted)
            if key is not None:
                with self._lock:
                    self._known[key] = results
                    for old in [*self._known][:-_REMEMBERED]:
                        del self._known[old]
        return tuple(x.expand(batch, heads, *x.shape[2:]) for x in results)


def _has_baseline(statistic: Statistic[Any, Any]) -> bool:
    """Return whether a statistic has a uniform baseline, and one number per query, key or head."""
    has_none = isinstance(statistic, LargestLogit)
    return isinstance(statistic, PerRow | Received | PositionInformation) and not has_none


def _is_same_for_all_items(statistic: Statistic[Any, Any]) -> bool:
    """Return whether a statistic uses the same positions for all batch items."""
    positions = getattr(statistic, "positions", None)
    return positions is None or max(x.items for x in positions) == 1
