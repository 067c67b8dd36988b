"""Sweep: the effect of ablating each head on a measure of the model."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any, NamedTuple, overload

from torch import Tensor

from saccade.recording.table_files import checked_file, write_csv
from saccade.support.errors import kind, shown, type_error
from saccade.support.validation import is_number


class HeadEffect(NamedTuple):
    """The effect of removing one head.

    Attributes:
        layer: the name of the layer.
        head: the index of the head.
        value: the measure without the head.
        difference: ``value`` minus the measure of the whole model.
    """

    layer: str
    head: int
    value: float
    difference: float


class Sweep(Sequence[HeadEffect]):
    """The effect of ablating each head of a model, by layer. It prints as a table, with the largest effects first.

    Attributes:
        baseline: the measure of the whole model.
    """

    def __init__(self, baseline: float, effects: Iterable[HeadEffect]):
        self.baseline = baseline
        self._effects = tuple(effects)

    def to_rows(self) -> list[dict[str, Any]]:
        """Return a list with one dict per head, for ``pandas.DataFrame``."""
        return [effect._asdict() for effect in self]

    def to_csv(self, path: str | os.PathLike[str]) -> Path:
        """Write the table of `to_rows` as CSV, in UTF-8 with a header, and return the path.

        An existing file is replaced when the new one is complete.

        Raises:
            TypeError, ValueError: the path does not name a file in an existing folder.
            OSError: the file cannot be written.
        """
        destination = checked_file(path)
        write_csv(destination, HeadEffect._fields, self.to_rows())
        return destination

    def strongest(self, count: int | None = None) -> list[HeadEffect]:
        """Return the ``count`` heads with the largest absolute differences, largest first; all heads when None."""
        return sorted(self._effects, key=lambda effect: -abs(effect.difference))[:count]

    def __len__(self) -> int:
        return len(self._effects)

    @overload
    def __getitem__(self, index: int) -> HeadEffect: ...

    @overload
    def __getitem__(self, index: slice) -> Sequence[HeadEffect]: ...

    def __getitem__(self, index: int | slice) -> HeadEffect | Sequence[HeadEffect]:
        return self._effects[index]

    def __repr__(self) -> str:
        width = max(map(len, ("whole model", *(effect.layer for effect in self))))
        rows = [
            f"{effect.layer:<{width}}  {effect.head:>4}  {effect.value:>12.6g}  {effect.difference:>+12.4g}"
            for effect in self.strongest()
        ]
        whole = f"{'whole model':<{width}}        {self.baseline:>12.6g}"
        return "\n".join([f"{'layer':<{width}}  head  {'value':>12}  {'difference':>12}", whole, *rows])


def measured(measure: Callable[[], float | Tensor]) -> float:
    """Call a measure of the model and return its result as a number.

    Raises:
        TypeError: the measure is not a function, or does not return a single number.
    """
    hint = "pass a function, such as lambda: model(ids, labels=ids).loss"
    if not callable(measure):
        raise type_error("measure", "be a function that returns a number", kind(measure), hint=hint)
    result = measure()
    if isinstance(result, Tensor) and result.numel() == 1 and not result.is_complex():
        return float(result)
    if not is_number(result):
        got = f"a tensor {list(result.shape)}" if isinstance(result, Tensor) else shown(result)
        raise type_error("measure", "return a single number", got, hint=hint)
    return float(result)


def swept(baseline: float, heads: Iterable[tuple[str, int]], without: Callable[[str, int], float]) -> Sweep:
    """Return the effect of removing each head; ``without(layer, head)`` returns the measure without that head."""
    effects = []
    for layer, head in heads:
        value = without(layer, head)
        effects.append(HeadEffect(layer, head, value, value - baseline))
    return Sweep(baseline, effects)
