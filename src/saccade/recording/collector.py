"""Collector: receive captured calls and add them to a recording."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable
from fnmatch import fnmatchcase
from typing import Any, NamedTuple

from saccade.integrations.call_output import AnyOutput
from saccade.integrations.capture_context import CapturedMatrix
from saccade.matrix import Matrix
from saccade.recording.call_matching import CallEnds
from saccade.recording.derived_matrices import chosen_heads
from saccade.recording.gradients import GradientsOfCalls
from saccade.recording.layer_record import Call, Run, statistics_of
from saccade.recording.stored_matrices import StoredMatrices
from saccade.recording.uniform_baselines import UniformBaselines
from saccade.statistics import Statistic
from saccade.support.errors import type_error, value_error

CALLED_AS = "record"  # in errors


class Selection:
    """The layers and heads to record.

    Args:
        layers: indices of layers, in the order of their first calls, or names of modules, where ``*`` matches
            anything; None for all layers.
        heads: indices of heads; None for all heads.

    Raises:
        TypeError, ValueError: an argument has the wrong type or is an empty list.
    """

    def __init__(self, layers: object, heads: object):
        chosen = _as_list(layers, "layers", (int, str))
        self._indices = None if chosen is None else {x for x in chosen if isinstance(x, int)}
        self._patterns = () if chosen is None else tuple(x for x in chosen if isinstance(x, str))
        indices = _as_list(heads, "heads", (int,))
        self.heads = None if indices is None else tuple(int(x) for x in indices)  # type: ignore[call-overload]
        if self.heads is not None and len(set(self.heads)) < len(self.heads):
            raise value_error("heads", "contain each head once", list(self.heads))
        self._known: dict[str, int] = {}
        self._used: set[int | str] = set()

    def has_layer(self, name: str) -> bool:
        """Return whether a layer is selected for recording.

        The order of the first calls to this method determines the indices of layers, so it must be called for every
        layer that runs.
        """
        index = self._known.setdefault(name, len(self._known))
        if self._indices is None:
            return True
        patterns = [pattern for pattern in self._patterns if pattern == name or fnmatchcase(name, pattern)]
        self._used.update(patterns)
        if index in self._indices:
            self._used.add(index)
        return index in self._indices or bool(patterns)

    def may_select(self, name: str) -> bool:
        """Return whether a module that could not be recorded may be one of the selected layers.

        The result is True if layers are selected by index, because the index of such a module is unknown.
        """
        is_named = any(fnmatchcase(name, pattern) for pattern in self._patterns)
        return self._indices is None or bool(self._indices) or is_named

    @property
    def called(self) -> tuple[str, ...]:
        """Names of all layers that were called, including those that are not selected."""
        return tuple(self._known)

    @property
    def unused(self) -> list[int | str]:
        """Selected indices and names that match no called layer."""
        chosen: list[int | str] = [*sorted(self._indices or ()), *self._patterns]
        return [selected for selected in chosen if selected not in self._used]


def _as_list(selection: object, name: str, kinds: tuple[type, ...]) -> list[object] | None:
    if selection is None:
        return None
    listed = (
        [selection]
        if isinstance(selection, int | str)
        else list(selection)
        if isinstance(selection, Iterable)
        else None
    )
    words = " and ".join({int: "ints", str: "names"}[kind] for kind in kinds)
    if listed is None or not all(isinstance(x, kinds) and not isinstance(x, bool) for x in listed):
        raise type_error(name, f"be {words}, or None for all", repr(selection))
    if not listed:
        raise value_error(name, "contain at least one", "none", hint="None means all")
    if any(isinstance(x, int) and x < 0 for x in listed):
        raise value_error(name, "be at least 0", listed)
    return listed


class KeepOptions(NamedTuple):
    """Options from the ``keep`` argument of `record`: which data to store for each call.

    Attributes:
        statistics: the statistics to compute.
        summaries: whether to compute all statistics of a summary.
        matrices: whether to store queries and keys.
        gradients: whether to store the backward pass's gradients with respect to the attention weights.
    """

    statistics: tuple[Statistic[Any, Any], ...]
    summaries: bool
    matrices: bool
    gradients: bool = False


class Collector:
    """A collector that receives captured calls from any thread and adds them to ``runs``.

    Args:
        options: which data to store for each call.
        selection: the layers and heads to record.
        callback: called with the name of the layer and each matrix; None for no callback.
    """

    def __init__(self, options: KeepOptions, selection: Selection, callback: Callable[[str, Matrix], None] | None):
        self._options, self._selection, self._callback = options, selection, callback
        self.runs: dict[str, list[Run]] = {}
        self._baselines = UniformBaselines()
        self._ends = CallEnds()
        self._lock = threading.Lock()
        self._is_over = False

    def on_call(self, name: str, captured: CapturedMatrix) -> None:
        """Add one captured call to a layer to the recording, if the layer is selected."""
        with self._lock:
            if not self._selection.has_layer(name):
                self._ends.skip(name, captured.make)
                return
        matrix = captured() if self._selection.heads is None else chosen_heads(captured(), self._selection.heads)
        if self._callback is not None:
            self._callback(name, matrix)
        if any(self._options):
            self._add_results(name, matrix, captured.output)

    def end(self) -> None:
        """Stop recording; calls still running in other threads are not recorded."""
        with self._lock:
            self._is_over = True
            self._ends.forget_skipped()

    def _add_results(self, name: str, matrix: Matrix, output: AnyOutput | None) -> None:
        # Compute before locking, so that threads run in parallel and a failure leaves no incomplete call.
        summary, statistics = statistics_of(matrix) if self._options.summaries else (None, None)
        results = matrix.compute(*self._options.statistics)
        baselines = self._baselines.of(matrix, self._options.statistics)
        call = Call(matrix.shape, 0, results, summary, statistics, *baselines)
        with self._lock:
            if self._is_over:
                return
            run, first_column = self._ends.continued(name, matrix)
            is_new = run is None
            run = run or self._new_run(name)
            run._add_call(matrix, call._replace(first_column=first_column))
            if is_new:
                self.runs[name] = [*self.runs.get(name, []), run]
            self._ends.end(name, run, matrix, first_column)
        if run.gradients is not None:
            run.gradients.watch(output, first_column, self._selection.heads)

    def _new_run(self, name: str) -> Run:
        options = self._options
        stored = StoredMatrices() if options.matrices else None
        return Run(name, options.statistics, stored, GradientsOfCalls(name) if options.gradients else None)
