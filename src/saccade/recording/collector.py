"""Collector: hears each call of a layer, and fills a recording."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable
from fnmatch import fnmatchcase
from typing import Any, NamedTuple

from saccade.matrix import Matrix
from saccade.recording.call_matching import Ends
from saccade.recording.derived_matrices import chosen_heads
from saccade.recording.layer_record import Call, Run, statistics_of
from saccade.recording.stored_matrices import StoredMatrices
from saccade.statistics import Fold
from saccade.support.errors import type_error, value_error

__all__ = ["Collector", "KeepOptions", "Selection"]

CALLED_AS = "record"  # in errors


class Selection:
    """Layers by number or name, heads by number.

    Args:
        layers: None for all; or numbers, counted in the order in which the layers speak, and names of modules, in
            which ``*`` stands for anything.
        heads: None for all; or numbers.
        where: the user's function, for error messages.

    Raises:
        TypeError, ValueError: something else; or nothing at all.
    """

    def __init__(self, layers: object, heads: object):
        chosen = _listed(layers, "layers", (int, str))
        self._numbers = None if chosen is None else {x for x in chosen if isinstance(x, int)}
        self._patterns = () if chosen is None else tuple(x for x in chosen if isinstance(x, str))
        numbers = _listed(heads, "heads", (int,))
        self.heads = None if numbers is None else tuple(int(x) for x in numbers)  # type: ignore[call-overload]
        if self.heads is not None and len(set(self.heads)) < len(self.heads):
            raise value_error("heads", "name each head once", list(self.heads))
        self._known: dict[str, int] = {}
        self._used: set[int | str] = set()

    def has_layer(self, name: str) -> bool:
        """Whether a layer is among the chosen ones; called with each layer in the order in which they speak."""
        number = self._known.setdefault(name, len(self._known))
        if self._numbers is None:
            return True
        patterns = [pattern for pattern in self._patterns if pattern == name or fnmatchcase(name, pattern)]
        self._used.update(patterns)
        if number in self._numbers:
            self._used.add(number)
        return number in self._numbers or bool(patterns)

    def may_mean(self, name: str) -> bool:
        """Whether a module that did not speak may be among the chosen ones: it would have had a number, too."""
        return self._numbers is None or bool(self._numbers) or any(fnmatchcase(name, one) for one in self._patterns)

    @property
    def called(self) -> tuple[str, ...]:
        """Every layer that spoke, chosen or not."""
        return tuple(self._known)

    @property
    def unused(self) -> list[int | str]:
        """What was chosen, and never spoke."""
        wanted: list[int | str] = [*sorted(self._numbers or ()), *self._patterns]
        return [one for one in wanted if one not in self._used]


def _listed(given: object, name: str, kinds: tuple[type, ...]) -> list[object] | None:
    if given is None:
        return None
    listed = [given] if isinstance(given, int | str) else list(given) if isinstance(given, Iterable) else None
    words = " and ".join({int: "ints", str: "names"}[kind] for kind in kinds)
    if listed is None or not all(isinstance(x, kinds) and not isinstance(x, bool) for x in listed):
        raise type_error(name, f"be {words}, or None for all", repr(given))
    if not listed:
        raise value_error(name, "name at least one", "none", hint="None means all")
    if any(isinstance(x, int) and x < 0 for x in listed):
        raise value_error(name, "be at least 0", listed)
    return listed


class KeepOptions(NamedTuple):
    """What is kept of each call.

    Attributes:
        folds: questions.
        summaries: whether all statistics are kept.
        matrices: whether queries and keys are kept.
    """

    folds: tuple[Fold[Any, Any], ...]
    summaries: bool
    matrices: bool


class Collector:
    """Takes in the calls that taps hear, in whichever thread the model runs, and fills ``runs``.

    Args:
        kept: what of each call.
        selection: of which layers and heads.
        callback: called with each matrix; none when None.
    """

    def __init__(self, kept: KeepOptions, selection: Selection, callback: Callable[[str, Matrix], None] | None):
        self._kept, self._selection, self._callback = kept, selection, callback
        self.runs: dict[str, list[Run]] = {}
        self._ends = Ends()
        self._lock = threading.Lock()
        self._is_over = False

    def on_call(self, name: str, make: Callable[[], Matrix]) -> None:
        """Take in one call of a layer."""
        with self._lock:
            if not self._selection.has_layer(name):
                self._ends.pass_over(name, make)
                return
        matrix = make() if self._selection.heads is None else chosen_heads(make(), self._selection.heads)
        if self._callback is not None:
            self._callback(name, matrix)
        if any(self._kept):
            self._take(name, matrix)

    def end(self) -> None:
        """Take in nothing any more, also of calls that other threads are in the middle of."""
        with self._lock:
            self._is_over = True
            self._ends.forget_passed_over()

    def _take(self, name: str, matrix: Matrix) -> None:
        # Answers first: what cannot be answered leaves no trace, and threads can be asked side by side.
        summary, statistics = statistics_of(matrix) if self._kept.summaries else (None, None)
        call = Call(matrix.shape, 0, matrix.ask(*self._kept.folds), summary, statistics)
        with self._lock:
            if self._is_over:
                return
            run, first_column = self._ends.continued(name, matrix)
            is_new = run is None
            run = run or Run(name, self._kept.folds, StoredMatrices() if self._kept.matrices else None)
            run._take(matrix, call._replace(first_column=first_column))
            if is_new:
                self.runs[name] = [*self.runs.get(name, []), run]
            self._ends.end(name, run, matrix, first_column)
