"""Run: the recorded data of one layer for a sequence of calls, each of which continues the previous one."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor

from saccade.matrix import AttentionMatrix, Matrix
from saccade.recording.derived_matrices import matrix_of_call
from saccade.recording.gradients import GradientsOfCalls
from saccade.recording.merge_statistics import joined_results, joined_summary, joined_sums
from saccade.recording.stored_matrices import StoredMatrices
from saccade.statistics import Entropy, LargestWeight, LogitVariance, Received, SquaredNorm, Statistic, Summary
from saccade.statistics.statistic import check_statistics
from saccade.statistics.summary import plain_statistics
from saccade.support.errors import UnsupportedError, unsupported

# Statistics that a summary already contains.
_IN_SUMMARY: dict[Statistic[Any, Any], str] = {
    Entropy(): "entropy",
    LargestWeight(): "largest_weight",
    LogitVariance(): "logit_variance",
    Received(): "received",
    SquaredNorm(): "squared_norm",
}


class Call(NamedTuple):
    """The recorded data of one call to a layer.

    Attributes:
        shape: (batch, heads, q_len, kv_len) of the call's matrix.
        first_column: index of the call's first key in the full sequence; above 0 if a cache has dropped earlier keys.
        answers: results of the statistics that were requested for the recording, in the same order.
        summary: the summary, if it was recorded; None if rows are not distributions.
        statistics: statistics of each query and key by name, if they were recorded; see `Run.statistics`.
        uniform: uniform baselines of `answers`, in the same order; None for those that were not computed.
        sees: True for queries that may attend to at least one key, bool ``[batch, heads, q_len]``; None if unknown.
    """

    shape: tuple[int, int, int, int]
    first_column: int
    answers: tuple[Any, ...]
    summary: Summary | None
    statistics: dict[str, Tensor] | None = None
    uniform: tuple[Any, ...] = ()
    sees: Tensor | None = None


def statistics_of(matrix: Matrix) -> tuple[Summary | None, dict[str, Tensor]]:
    """Return a matrix's summary (None if its rows are not distributions) and its statistics by name."""
    if not (matrix.is_stochastic or isinstance(matrix, AttentionMatrix)):
        return None, plain_statistics(matrix)
    summary = matrix.summary()
    return summary, {**summary.rows, "received": summary.received}


class Run:
    """The recorded data of one layer, for a forward pass or for a whole generation (prompt and decoded tokens).

    Attributes:
        name: name of the layer.
        calls: all calls of the run, in order.
    """

    def __init__(
        self,
        name: str,
        statistics: tuple[Statistic[Any, Any], ...],
        stored: StoredMatrices | None,
        gradients: GradientsOfCalls | None = None,
    ):
        self.name = name
        self.gradients = gradients
        self.calls: list[Call] = []
        self._statistics, self._stored = statistics, stored
        self._last_kind: tuple[object, ...] = ()

    def _can_continue(self, matrix: Matrix) -> bool:
        """Return whether the rows of a call's matrix can be appended to the run."""
        return _kind(matrix) == self._last_kind

    def _add_call(self, matrix: Matrix, call: Call) -> None:
        """Append a call to the run, and store its matrix if matrices are recorded."""
        self.calls.append(call)
        self._last_kind = _kind(matrix)
        if self._stored is not None:
            self._stored.add(matrix, call.first_column)

    @property
    def shape(self) -> tuple[int, int, int, int]:
        """Shape of the run's matrix, (batch, heads, queries of all calls, keys)."""
        batch, heads, _, _ = self.calls[0].shape
        q_len = sum(call.shape[2] for call in self.calls)
        return (batch, heads, q_len, max(call.first_column + call.shape[3] for call in self.calls))

    @property
    def matrix(self) -> Matrix:
        """The matrix of all calls, built from the recorded queries and keys.

        Raises:
            UnsupportedError: queries and keys were not recorded.
        """
        if self._stored is None:
            raise self._missing(f"queries and keys of {self.name} were not kept")
        return self._stored.matrix()

    @property
    def gradient(self) -> Matrix:
        """The gradient of the loss with respect to the weights of all calls, a lazy matrix with the shape of `matrix`.

        Raises:
            UnsupportedError: gradients were not recorded, no backward pass has run, or the gradient is unknown.
        """
        if self.gradients is None:
            reason = f"gradients of {self.name} were not kept"
            raise unsupported("the recording", [reason], hint='record(model, keep="gradients")')
        return self.gradients.matrix()

    @property
    def statistics(self) -> dict[str, Tensor]:
        """Statistics of every query and key of the run, by name.

        The statistics of queries, ``[batch, heads, q_len]``, are "entropy", "largest_weight", "first_mass",
        "self_mass", "previous_mass", "local_mass", "distance" and more (`saccade.statistics.Summary.rows`).
        "received", ``[batch, heads, kv_len]``, is the attention that each key receives. Rows of several calls are
        concatenated. If rows are not distributions, as in a recurrence, only statistics for weights of any sign are
        available: "largest_weight", the masses (sums of weights), "squared_norm", "given_mass" (the sum of the row)
        and "received".

        Raises:
            UnsupportedError: neither statistics nor queries and keys were recorded.
        """
        kept = [call.statistics for call in self.calls if call.statistics is not None]
        if not kept:
            if self._stored is None:
                raise self._missing(f"statistics of {self.name} were not kept", 'keep="statistics"')
            return statistics_of(self._stored.matrix())[1]
        received = joined_sums([values["received"] for values in kept], [call.first_column for call in self.calls])
        return {
            **{name: torch.cat([values[name] for values in kept], 2) for name in kept[0] if name != "received"},
            "received": received,
        }

    @property
    def kept(self) -> tuple[Statistic[Any, Any], ...]:
        """The requested statistics that were computed while recording."""
        return self._statistics

    def summary(self) -> Summary:
        """Return statistics of every head as a table, compared with uniform attention; ``print`` shows it.

        Raises:
            UnsupportedError: the statistics were not recorded, or the rows are not distributions.

        Cost: O(length) if they were recorded; otherwise see `saccade.Matrix.summary`.
        """
        if len(self.calls) == 1 and self.calls[0].summary is not None:
            return self.calls[0].summary
        if self._stored is not None:
            return self._stored.matrix().summary()
        summaries = [call.summary for call in self.calls if call.summary is not None]
        if len(summaries) == len(self.calls):
            return joined_summary(summaries, [call.first_column for call in self.calls], self.statistics)
        if self.calls[0].statistics is None:
            raise self._missing(f"statistics of {self.name} were not kept", 'keep="statistics"')
        reason = f"the rows of {self.name} do not sum to 1 (is_stochastic is False)"
        hint = "Run.statistics has the statistics that apply; record(model, layers=...) selects other layers"
        raise unsupported("a summary", [reason], hint=hint)

    def compute(self, *statistics: Statistic[Any, Any]) -> tuple[Any, ...]:
        """Return statistics of the run; without recorded queries and keys, only those computed while recording.

        Args:
            statistics: statistics from `saccade.statistics`, or custom ones.

        Raises:
            UnsupportedError: a statistic was not computed while recording, or its results for several calls cannot be
                combined.

        Cost: none for recorded statistics; otherwise see `saccade.Matrix.compute`.
        """
        check_statistics(statistics)
        if self._stored is not None and not (
            len(self.calls) == 1 and all(statistic in self._statistics for statistic in statistics)
        ):
            return self.matrix.compute(*statistics)
        return tuple(self._result(statistic) for statistic in statistics)

    def uniform(self, *statistics: Statistic[Any, Any]) -> tuple[Any, ...]:
        """Return the uniform baselines of statistics: their results for equal weights on all visible keys of a query.

        Args:
            statistics: statistics from `saccade.statistics`, or custom ones.

        Raises:
            UnsupportedError: a statistic has no baseline (such as the largest logit), or its baseline was not computed
                while recording. Recording computes baselines of statistics with one number per query, key or head.

        Cost: none for recorded baselines; otherwise the same as for the statistics. See `saccade.Matrix.uniform`.
        """
        check_statistics(statistics)
        if self._stored is not None:
            return tuple(statistic.uniform(self.matrix) for statistic in statistics)
        return tuple(self._baseline(statistic) for statistic in statistics)

    def _baseline(self, statistic: Statistic[Any, Any]) -> Any:
        if statistic not in self._statistics:
            raise self._missing(f"{statistic} was not computed while recording", "add it to keep=")
        baselines = [call.uniform[self._statistics.index(statistic)] for call in self.calls]
        if any(baseline is None for baseline in baselines):
            raise self._missing(f"no uniform baseline of {statistic} was computed while recording")
        if len(baselines) == 1:
            return baselines[0]
        return joined_results(statistic, baselines, [call.first_column for call in self.calls])

    @property
    def _has_statistics(self) -> bool:
        return self._stored is not None or self.calls[0].statistics is not None

    def _visible_rows(self) -> Tensor | None:
        """Return which queries may attend to at least one key, bool ``[batch, heads, q_len]``, or None if unknown."""
        if self._stored is not None:
            try:
                return LargestWeight().uniform(self._stored.matrix()) > 0
            except UnsupportedError:  # no mask is known
                return None
        visible = [call.sees for call in self.calls if call.sees is not None]
        return torch.cat(visible, 2) if len(visible) == len(self.calls) else None

    def _result(self, statistic: Statistic[Any, Any]) -> Any:
        if statistic in self._statistics:
            answers = [call.answers[self._statistics.index(statistic)] for call in self.calls]
            if len(answers) == 1:
                return answers[0]
            return joined_results(statistic, answers, [call.first_column for call in self.calls])
        name = next((key for known, key in _IN_SUMMARY.items() if known == statistic), "")
        if self.calls[0].statistics is not None and name in self.statistics:
            return self.statistics[name]
        raise self._missing(f"{statistic} was not computed while recording", "add it to keep=")

    def _missing(self, reason: str, hint: str = "") -> UnsupportedError:
        hint = " or ".join(filter(None, [hint, 'keep="qk", which allows every statistic later']))
        return unsupported("the recording", [reason], hint=hint)

    def __copy__(self) -> Run:
        """Return a snapshot of the run; later calls are not added to it."""
        copied = Run(self.name, self._statistics, self._stored, self.gradients)
        copied.calls, copied._last_kind = [*self.calls], self._last_kind
        return copied

    def __repr__(self) -> str:
        kept = ["queries and keys"] if self._stored is not None else []
        kept += ["statistics"] if self.calls[0].statistics is not None else []
        return f"Run({self.name!r}, shape={list(self.shape)}, kept={', '.join([*kept, *map(str, self._statistics)])})"


def _kind(matrix: Matrix) -> tuple[object, ...]:
    return (
        type(matrix_of_call(matrix)),
        matrix.is_stochastic,
        matrix.shape[:2],
        matrix.kv_heads,
        matrix.dtype,
        matrix.device,
    )
