"""Build the table of a recording, with a row for each statistic of each head and its uniform baseline."""

from __future__ import annotations

import dataclasses
import math
import re
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from torch import Tensor

from saccade.recording.layer_record import Run
from saccade.statistics import Coverage, LargestLogit, Measure, Parts, PerRow, PositionInformation, Statistic
from saccade.statistics.mass import PARTS
from saccade.statistics.summary import plain_statistics
from saccade.support.errors import UnsupportedError, unsupported

CALLED_AS = "Recording"  # in errors

COLUMNS = ("layer", "layer_index", "run", "batch", "head", "statistic", "unit", "value", "uniform")
_UNITS = {
    "entropy": "nats",
    "distance": "tokens",
    "coverage": "keys",
    "position_information": "nats",
    "logit_variance": "nats²",
    "largest_logit": "nats",
    "squared_norm": "1",
}


TableRow = dict[str, str | int | float]
"""A row of a recording's table: one number of one head, with the cells in `COLUMNS`. See `Recording.to_rows`."""


def table_rows(runs: Mapping[str, Sequence[Run]], heads: Sequence[int] | None) -> list[TableRow]:
    """Return the rows of all runs, ordered by layer, run, batch item, head and statistic.

    Args:
        runs: the runs of each layer by name.
        heads: the recorded heads; None for all.

    Raises:
        UnsupportedError: no statistic with a number per head was recorded.
    """
    rows = [
        {
            "layer": name,
            "layer_index": index,
            "run": number,
            "batch": batch,
            "head": head if heads is None else heads[head],
            "statistic": measure.name,
            "unit": measure.unit,
            "value": values[position][batch][head],
            "uniform": baselines[position][batch][head],
        }
        for index, (name, layer_runs) in enumerate(runs.items())
        for number, run in enumerate(layer_runs)
        for measures in [measures_of(run)]
        for values, baselines in [([x.values.tolist() for x in measures], [x.uniform.tolist() for x in measures])]
        for batch in range(run.shape[0])
        for head in range(run.shape[1])
        for position, measure in enumerate(measures)
    ]
    if not rows:
        reason = "it has no statistic with one number for each head"
        raise unsupported("a table of the recording", [reason], hint='record(model, keep="statistics") does')
    return rows


def measures_of(run: Run) -> tuple[Measure, ...]:
    """Return all measures of a run with one number per head: the summary's, and the means of other statistics."""
    named = {measure.name: measure for measure in _of_summary(run)}
    for statistic in run.kept:
        for measure in _of_statistic(run, statistic):
            named.setdefault(measure.name, measure)
    return tuple(named.values())


def _of_summary(run: Run) -> Iterator[Measure]:
    """Yield a run's summary measures, or the means of its plain statistics if rows are not distributions."""
    try:
        yield from run.summary().measures
        return
    except UnsupportedError:
        if not run._has_statistics:
            return
    baselines = _plain_baselines(run)
    for name, values in run.statistics.items():
        if name != "received":
            mean = values.mean(-1)
            unknown = mean.new_full(mean.shape, math.nan)
            yield Measure(name, _unit(name), "", mean, baselines[name].mean(-1) if name in baselines else unknown)


def _plain_baselines(run: Run) -> dict[str, Tensor]:
    """Return the plain statistics of uniform attention by name; empty if the run stored no matrix with a mask."""
    try:
        return plain_statistics(run.matrix.uniform())
    except UnsupportedError:
        return {}


def _of_statistic(run: Run, statistic: Statistic[Any, Any]) -> Iterator[Measure]:
    """Yield the means of a requested statistic over queries, and the means of its uniform baseline.

    For `LargestLogit`, yield the maximum over queries instead, as in a summary.
    """
    if isinstance(statistic, PositionInformation):
        (result,), uniform = run.compute(statistic), _baseline(run, statistic)
        yield Measure("position_information", "nats", "", result, uniform if uniform is not None else result * math.nan)
    if not isinstance(statistic, PerRow):
        return
    (result,), uniform = run.compute(statistic), _baseline(run, statistic)
    if not isinstance(result, Tensor) or result.shape[:3] != run.shape[:3] or result.dim() > 4:
        return
    seen = run._visible_rows()
    for index, name in enumerate(_names(statistic, result.shape[3] if result.dim() == 4 else 0)):
        values, baseline = (None if x is None else x if x.dim() == 3 else x[..., index] for x in (result, uniform))
        assert values is not None
        mean = values.amax(-1) if isinstance(statistic, LargestLogit) else _mean(values, seen)
        yield Measure(name, _unit(name), "", mean, mean * math.nan if baseline is None else _mean(baseline, seen))


def _baseline(run: Run, statistic: Statistic[Any, Any]) -> Any:
    try:
        return run.uniform(statistic)[0]
    except UnsupportedError:
        return None


def _mean(values: Tensor, seen: Tensor | None) -> Tensor:
    """Return the mean over queries that may attend to at least one key, or over all queries if ``seen`` is None."""
    values = values if values.is_floating_point() else values.double()
    if seen is None:
        return values.mean(-1)
    return values.where(seen, 0.0).sum(-1) / seen.sum(-1)


def _names(statistic: PerRow, count: int) -> list[str]:
    """Return names for a statistic's ``count`` numbers per query, such as ``lag_mass_1``; 0 means one number."""
    name = re.sub(r"(?<=[a-z])(?=[A-Z])", "_", type(statistic).__name__).lower()
    if isinstance(statistic, Parts):
        return [f"{part}_part" for part in PARTS]
    if isinstance(statistic, Coverage):
        return [f"{name}_{share:g}" for share in statistic.shares]
    if dataclasses.is_dataclass(statistic):
        settings = (getattr(statistic, field.name) for field in dataclasses.fields(statistic))
        name = "_".join([name, *(f"{x:g}" for x in settings if isinstance(x, int | float))])
    return [f"{name}_{place}" for place in range(count)] if count else [name]


def _unit(name: str) -> str:
    known = next((unit for start, unit in _UNITS.items() if name.startswith(start)), "")
    return known or ("share" if re.search(r"mass|part|weight", name) else "")
