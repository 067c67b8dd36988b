"""The kinds of layers that a page can show: lazy matrices, dense weights and recorded results."""

from __future__ import annotations

import copy
from collections.abc import Mapping, Sequence
from functools import cached_property
from typing import Any, NamedTuple, Protocol, TypeGuard

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from saccade.matrix import AttentionMatrix, DenseMatrix, Matrix
from saccade.statistics import Measure, Pooled, Statistic, Summary, TopK
from saccade.statistics.pooled import How
from saccade.statistics.summary import plain_statistics
from saccade.support.errors import UnsupportedError, kind, type_error, value_error
from saccade.viz.arrays import Array
from saccade.viz.page.page_statistics import PooledColumns, Strong, StrongestPairs
from saccade.viz.pooled_maps import sweep_maps

Columns = tuple[tuple[int, ...], ...]
"""For each selected map column, the keys to pool again; the column's other keys, such as sinks, are left out."""


class Map(NamedTuple):
    """Pooled maps of a layer's heads on a page.

    Attributes:
        cells: the maps, ``[heads, rows, columns]``; NaN marks masked cells.
        beside: selected columns of the maps, pooled again without attention sinks, ``[heads, rows, selected columns]``.
        answers: results of the additional statistics.
        how: how the weights of a cell are reduced to one number, as in `saccade.statistics.Pooled`.
    """

    cells: Array
    beside: Array
    answers: tuple[Any, ...] = ()
    how: How = "max"


class Head(NamedTuple):
    """A larger map and the strongest weights of one head, as details on a page; each is None if it is unknown."""

    map: Map | None
    strong: Strong | None


class Source(Protocol):
    """The interface of a layer on a page; each method returns data of one batch item."""

    @property
    def shape(self) -> tuple[int, int, int, int]:
        """Shape of the layer's attention matrix, ``(batch, heads, q_len, kv_len)``."""

    @property
    def is_signed(self) -> bool:
        """Whether weights of the layer may be below 0."""

    def measures(self, item: int) -> list[Measure]:
        """Return statistics of the layer's heads, each ``[1, heads]``."""

    def received(self, item: int) -> Tensor | None:
        """Return the attention that each key of the layer receives, ``[heads, kv_len]``."""

    def map(self, item: int, bins: int, columns: Columns, statistics: Sequence[Statistic[Any, Any]]) -> Map | None:
        """Return small maps of the layer's heads with additional statistics, or None if the maps are unknown."""

    def head(self, item: int, head: int, bins: int, columns: Columns, k: int) -> Head:
        """Return the details of one head of the layer: a larger map and the strongest weights."""


class Recorded(Protocol):
    """The interface of a recorded layer on a page, implemented by `saccade.recording.layer_record.Run`."""

    @property
    def shape(self) -> tuple[int, int, int, int]:
        """Shape of the recorded layer's attention matrix, ``(batch, heads, q_len, kv_len)``."""

    @property
    def matrix(self) -> Matrix:
        """The recorded layer's attention matrix. It is available only if queries and keys were recorded."""

    @property
    def kept(self) -> tuple[Statistic[Any, Any], ...]:
        """The additional statistics that were recorded, such as pooled maps."""

    @property
    def statistics(self) -> dict[str, Tensor]:
        """The recorded statistics of the layer's queries and keys, by name."""

    def summary(self) -> Summary:
        """Return the summary statistics of the recorded layer's heads."""

    def compute(self, *statistics: Statistic[Any, Any]) -> tuple[Any, ...]:
        """Return the results of additional statistics of the recorded layer."""


def layers_of(data: object) -> dict[str, Source]:
    """Convert the data that the user passed to `report` to the layers of a page, by name.

    Raises:
        TypeError: the argument is neither matrices, nor weights, nor a recording.
        ValueError: there is no layer, or a layer has no queries, keys or heads.
    """
    if isinstance(data, Matrix | Tensor | np.ndarray):
        named: dict[str, object] = {"attention": data}
    elif isinstance(data, Mapping):
        named = {str(name): data[name] for name in data}
    elif isinstance(data, Sequence) and not isinstance(data, str):
        named = {str(number): layer for number, layer in enumerate(data)}
    else:
        raise type_error("given", _RULE, kind(data))
    layers = {name: _source_of(name, layer) for name, layer in named.items()}
    if not layers:
        hint = "record(model) records the layers that run inside its block"
        raise value_error("given", "contain at least one layer", "none", hint=hint)
    for name, source in layers.items():
        if 0 in source.shape:
            raise value_error("weights", "have no empty axis", f"shape {list(source.shape)} in layer {name}")
    return layers


_RULE = "be a matrix, weights [batch, heads, q_len, kv_len], a list or a dict of them, or a recording"


def _source_of(name: str, data: object) -> Source:
    if isinstance(data, Matrix):
        if data.hidden != 0:
            raise type_error("given", _RULE, f"{kind(data)}, which contains scores, in layer {name}")
        return MatrixLayer(data)
    if isinstance(data, Tensor | np.ndarray):
        is_real = data.dtype.kind in "fiu" if isinstance(data, np.ndarray) else _is_real(data.dtype)
        if data.ndim != 4 or not is_real:
            got = f"shape {list(data.shape)}, {data.dtype} in layer {name}"
            raise value_error("weights", "be real numbers [batch, heads, q_len, kv_len]", got)
        return MatrixLayer(_dense(data))
    if _is_recorded(data):
        try:
            return MatrixLayer(data.matrix)
        except UnsupportedError:  # only results were recorded, not queries and keys
            return RecordedLayer(data)
    raise type_error("given", _RULE, f"{kind(data)} in layer {name}")


def _is_real(dtype: torch.dtype) -> bool:
    return not (dtype.is_complex or dtype == torch.bool)


def _is_recorded(layer: object) -> TypeGuard[Recorded]:
    """Return whether an object is a recorded layer.

    Only the object's type is checked, because reading its properties may be slow.
    """
    names = ("shape", "matrix", "kept", "statistics", "summary", "compute")
    return all(hasattr(type(layer), name) for name in names)


class MatrixLayer(Source):
    """A layer of a page whose attention matrix is known, so that everything on the page can be computed from it."""

    def __init__(self, matrix: Matrix):
        self._matrix = matrix

    @cached_property
    def _summary(self) -> Summary | None:
        return self._matrix.summary() if self._has_summary else None

    @cached_property
    def _plain(self) -> dict[str, Tensor]:
        return {} if self._has_summary else plain_statistics(self._matrix)

    @cached_property
    def _has_summary(self) -> bool:
        return self._matrix.is_stochastic or isinstance(self._matrix, AttentionMatrix)

    @property
    def shape(self) -> tuple[int, int, int, int]:
        return self._matrix.shape

    @cached_property
    def is_signed(self) -> bool:
        if isinstance(self._matrix, DenseMatrix):
            return self._matrix.is_signed
        return not self._has_summary

    def measures(self, item: int) -> list[Measure]:
        return _measures(self._summary, self._plain, item)

    def received(self, item: int) -> Tensor | None:
        return (self._plain["received"] if self._summary is None else self._summary.received)[item]

    def map(self, item: int, bins: int, columns: Columns, statistics: Sequence[Statistic[Any, Any]]) -> Map:
        return self._map(item, range(self.shape[1]), bins, columns, statistics)

    def head(self, item: int, head: int, bins: int, columns: Columns, k: int) -> Head:
        large = self._map(item, range(head, head + 1), bins, columns, [StrongestPairs(k)])
        return Head(large, large.answers[0])

    def _map(
        self, item: int, heads: range, bins: int, columns: Columns, statistics: Sequence[Statistic[Any, Any]]
    ) -> Map:
        cells, answers = sweep_maps(self._matrix, item, heads, bins, [PooledColumns(bins, columns), *statistics])
        return Map(cells, answers[0][0].cpu().numpy(), answers[1:])


class RecordedLayer(Source):
    """A layer of a page of which only results were recorded, not queries and keys."""

    def __init__(self, run: Recorded):
        self._run = copy.copy(run)  # another thread may still extend it

    @property
    def shape(self) -> tuple[int, int, int, int]:
        return self._run.shape

    @cached_property
    def is_signed(self) -> bool:
        if "given_mass" in self._statistics:  # recorded if the rows are not distributions; a softmax still has logits
            return "largest_logit" not in self._statistics
        return self._pooled is not None and bool((self._pooled < 0).any())

    def measures(self, item: int) -> list[Measure]:
        try:
            return _measures(self._run.summary(), {}, item)
        except UnsupportedError:
            return _measures(None, self._statistics, item)

    def received(self, item: int) -> Tensor | None:
        received = self._statistics.get("received")
        return None if received is None else received[item]

    def map(self, item: int, bins: int, columns: Columns, statistics: Sequence[Statistic[Any, Any]]) -> Map | None:
        if self._pooled is None or self._best is None:
            return None
        cells = self._pooled[item].float().cpu().numpy()
        is_whole = cells.shape[2] == self.shape[3] <= bins  # in this case, a column has only one key
        return Map(cells, np.zeros((*cells.shape[:2], len(columns) if is_whole else 0), np.float32), (), self._best.how)

    def head(self, item: int, head: int, bins: int, columns: Columns, k: int) -> Head:
        kept = max(
            (statistic for statistic in self._run.kept if isinstance(statistic, TopK)),
            key=lambda statistic: statistic.k,
            default=None,
        )
        if kept is None:
            return Head(None, None)
        weights, keys = (x[item : item + 1, head : head + 1] for x in self._run.compute(kept)[0])
        nothing = weights.new_zeros(1, 1, self.shape[3], 0)
        return Head(None, Strong(weights, keys, nothing, nothing.long()))

    @property
    def _best(self) -> Pooled | None:
        """The recorded statistic with the most detailed map of the layer, or None if no map was recorded."""
        kept = [statistic for statistic in self._run.kept if isinstance(statistic, Pooled)]
        return max(kept, key=lambda statistic: (statistic.how == "max", statistic.bins), default=None)

    @cached_property
    def _pooled(self) -> Tensor | None:
        """The most detailed recorded map of the layer, ``[batch, heads, rows, columns]``, or None if there is none."""
        try:
            return None if self._best is None else self._run.compute(self._best)[0]
        except UnsupportedError:  # maps of several calls cannot be combined
            return None

    @cached_property
    def _statistics(self) -> dict[str, Tensor]:
        try:
            return self._run.statistics
        except UnsupportedError:
            return {}


def _measures(summary: Summary | None, plain: Mapping[str, Tensor], item: int) -> list[Measure]:
    """Return the statistics of a page's layer for one batch item.

    If there is no summary, the recorded statistics are averaged over queries, or reduced to their maximum.
    """
    if summary is not None:
        cut = slice(item, item + 1)
        return [each._replace(values=each.values[cut], uniform=each.uniform[cut]) for each in summary.measures]
    measures = []
    for name, values in plain.items():
        if name != "received":
            rows = values[item : item + 1].cpu().double()
            is_peak = name == "largest_logit"
            total, meaning = (rows.amax(-1), "of all scores") if is_peak else (rows.mean(-1), "mean over queries")
            measures.append(Measure(name, "", meaning, total, torch.full_like(total, torch.nan)))
    return measures


def _dense(weights: Tensor | npt.NDArray[Any]) -> DenseMatrix:
    """Convert dense weights to a matrix; arrays are copied to a byte order and dtype that torch can read."""
    if isinstance(weights, np.ndarray):
        is_known = weights.dtype in (np.float16, np.float32, np.float64)
        weights = torch.from_numpy(weights.astype(weights.dtype if is_known else np.float32, order="C"))
    return DenseMatrix(weights.detach() if weights.is_floating_point() else weights.float())
