"""Recording: the recorded data of all attention layers of a model."""

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
    """The recorded data of all attention layers by name, in the order of their first calls.

    ``recording[name]`` is the last `Run` of the layer with this name, ``recording[number]`` the last run of the layer
    with this number, and ``recording.runs(name)`` contains all runs of a layer. `record` creates the recording and
    fills it while the model runs.

    Args:
        runs: the runs of each layer, in order.
        not_recorded: class names, by module name, of modules that seem to be attention but could not be recorded.
    """

    def __init__(self, runs: dict[str, list[Run]], not_recorded: Mapping[str, str] = MappingProxyType({})):
        self._runs, self._not_recorded = runs, not_recorded

    @property
    def layers(self) -> tuple[str, ...]:
        """Names of the recorded layers."""
        return tuple(self._runs)

    @property
    def not_recorded(self) -> tuple[str, ...]:
        """Names of attention modules whose calls could not be recorded.

        These modules compute their weights with their own operations, or have no weights.
        """
        return tuple(self._not_recorded)

    @property
    def unheard(self) -> tuple[str, ...]:
        """The names in `not_recorded`, under the former name of that attribute."""
        return self.not_recorded

    def runs(self, layer: str | int) -> tuple[Run, ...]:
        """Return all runs of a layer; each call that does not continue the previous call begins a new run.

        Raises:
            KeyError: the layer was not recorded.
        """
        return tuple(self._runs[self._name(layer)])

    def compute(self, *statistics: Statistic[Any, Any]) -> dict[str, tuple[Any, ...]]:
        """Compute statistics of the last run of every layer; return the results by layer name. See `Run.compute`."""
        return {name: self[name].compute(*statistics) for name in self}

    def ask(self, *statistics: Statistic[Any, Any]) -> dict[str, tuple[Any, ...]]:
        """Call `compute`, under its former name."""
        return self.compute(*statistics)

    def by_head(self, name: str) -> Tensor:
        """Return one measure for every head in the last run of every layer, ``[layers, batch, heads]``.

        Args:
            name: name of a measure in `saccade.statistics.Summary`, such as "entropy" or "first_mass".

        Raises:
            KeyError: there is no measure with this name.
            ValueError: the layers have different batches or numbers of heads.
            UnsupportedError: statistics were not recorded; see `Run.summary`.

        Cost: none if statistics were recorded.
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
