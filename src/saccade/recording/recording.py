"""Recording: the recorded data of every layer."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from types import MappingProxyType
from typing import Any

import torch
from torch import Tensor

from saccade.recording.layer_record import Run
from saccade.statistics import Statistic
from saccade.support.errors import value_error
from saccade.support.validation import is_integer


class Recording(Mapping[str, Run]):
    """The recorded data of every attention layer by name, in the order of their first calls.

    ``recording[name]`` is the last `Run` of a layer, ``recording[number]`` that of the layer with this number;
    ``recording.runs(name)`` are all of them. `record` makes it, and fills it while the model runs.

    Args:
        runs: of each layer, in order.
        not_recorded: class names, by name, of modules that seem to be attention and could not be recorded.
    """

    def __init__(self, runs: dict[str, list[Run]], not_recorded: Mapping[str, str] = MappingProxyType({})):
        self._runs, self._not_recorded = runs, not_recorded

    @property
    def layers(self) -> tuple[str, ...]:
        """Names of the layers that were recorded."""
        return tuple(self._runs)

    @property
    def not_recorded(self) -> tuple[str, ...]:
        """Names of modules that attend, but of whose calls no matrix was recorded.

        They compute their weights in operations of their own, or have none.
        """
        return tuple(self._not_recorded)

    def runs(self, layer: str | int) -> tuple[Run, ...]:
        """All runs of a layer: a new one begins with each call that does not go on from the one before.

        Raises:
            KeyError: no such layer was recorded.
        """
        return tuple(self._runs[self._name(layer)])

    def compute(self, *statistics: Statistic[Any, Any]) -> dict[str, tuple[Any, ...]]:
        """Answers of every layer's last run, by name; see `Run.compute`."""
        return {name: self[name].compute(*statistics) for name in self}

    def by_head(self, name: str) -> Tensor:
        """One measure of every head of every layer's last run, ``[layers, batch, heads]``: a grid to look at.

        Args:
            name: of a measure of `saccade.statistics.Summary`, such as "entropy" or "first_mass".

        Raises:
            KeyError: there is no measure of this name.
            ValueError: layers of different batches or numbers of heads.
            UnsupportedError: statistics were not kept; see `Run.summary`.

        Cost: none where statistics were kept.
        """
        found = [run.summary().named(name).values for run in self.values()]
        shapes = sorted({tuple(values.shape) for values in found})
        if len(shapes) != 1:
            got = ", ".join(map(str, shapes)) or "no layers"
            hint = "record(model, layers=...) chooses layers that are alike"
            raise value_error("layers", "have equal batches and heads", got, hint=hint)
        return torch.stack(found)

    def __getitem__(self, layer: str | int) -> Run:
        return self._runs[self._name(layer)][-1]

    def __iter__(self) -> Iterator[str]:
        return iter(tuple(self._runs))  # other threads may still record

    def __len__(self) -> int:
        return len(self._runs)

    def __repr__(self) -> str:
        lines = [
            f"    {name}: {len(runs)} {'run' if len(runs) == 1 else 'runs'}, the last of shape {list(runs[-1].shape)}"
            for name, runs in tuple(self._runs.items())
        ]
        lines += [f"    {name}: ran, and was not recorded ({kind})" for name, kind in tuple(self._not_recorded.items())]
        return "\n".join([f"Recording of {len(self)} layers", *lines])

    def _name(self, layer: str | int) -> str:
        names = list(self._runs)
        if is_integer(layer) and -len(names) <= layer < len(names):
            return names[layer]
        if layer in self._runs:
            return str(layer)
        there = ", ".join(names) or "none, since nothing was recorded"
        raise KeyError(f"Recording: layer must be one of {there}; got {layer!r}.")
