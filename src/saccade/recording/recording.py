"""Recording: the recorded data of all attention layers of a model."""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from types import MappingProxyType
from typing import Any

import torch
from torch import Tensor

from saccade.recording.gradients import Gradients
from saccade.recording.layer_record import Run
from saccade.recording.table_files import checked_file, parquet_writer, write_csv, write_parquet
from saccade.recording.table_rows import COLUMNS, TableRow, table_rows
from saccade.recording.word_links import Link, Place, RankBy, rank_links
from saccade.statistics import Statistic
from saccade.support.errors import value_error
from saccade.support.validation import check_int, is_integer
from saccade.viz.page.texts import Tokens


class Recording(Mapping[str, Run]):
    """The recorded data of all attention layers by name, in the order of their first calls.

    ``recording[name]`` is the last `Run` of the layer with this name, ``recording[index]`` is the last run of the layer
    with this index, and ``recording.runs(name)`` contains all runs of a layer. `record` creates the recording and
    fills it while the model runs.

    Args:
        runs: the runs of each layer, in order.
        not_recorded: class names, by module name, of modules that seem to be attention but could not be recorded.
        heads: the heads that were recorded, as numbered in the model; None for all.
    """

    def __init__(
        self,
        runs: dict[str, list[Run]],
        not_recorded: Mapping[str, str] = MappingProxyType({}),
        heads: Sequence[int] | None = None,
    ):
        self._runs, self._not_recorded, self._heads = runs, not_recorded, heads

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
    def gradients(self) -> Gradients:
        """Gradients of the loss with respect to each layer's attention weights in its last run.

        They require ``record(..., keep="gradients")``. ``saccade.matrix.ElementwiseProduct(run.matrix, gradient)`` is
        attention times gradient; `saccade.statistics` accepts both.
        """
        return Gradients(self)

    def runs(self, layer: str | int) -> tuple[Run, ...]:
        """Return all runs of a layer; each call that does not continue the previous call begins a new run.

        Raises:
            KeyError: the layer was not recorded.
        """
        return tuple(self._runs[self._name(layer)])

    def compute(self, *statistics: Statistic[Any, Any]) -> dict[str, tuple[Any, ...]]:
        """Compute statistics of the last run of every layer; return the results by layer name. See `Run.compute`."""
        return {name: self[name].compute(*statistics) for name in self}

    def uniform(self, *statistics: Statistic[Any, Any]) -> dict[str, tuple[Any, ...]]:
        """Return the uniform baselines of statistics for the last run of every layer, by name; see `Run.uniform`."""
        return {name: self[name].uniform(*statistics) for name in self}

    def by_head(self, name: str) -> Tensor:
        """Return one summary measure of every head in each layer's last run, ``[layers, batch, heads]``.

        Args:
            name: name of a measure in `saccade.statistics.Summary`, such as "entropy" or "first_mass".

        Raises:
            KeyError: there is no measure with this name.
            ValueError: the layers have different batches or numbers of heads.
            UnsupportedError: statistics were not recorded; see `Run.summary`.

        Cost: none if statistics were recorded.
        """
        values_by_layer = [run.summary().named(name).values for run in self.values()]
        shapes = sorted({tuple(values.shape) for values in values_by_layer})
        if len(shapes) != 1:
            got = ", ".join(map(str, shapes)) or "no layers"
            hint = "record(model, layers=...) selects layers of equal shapes"
            raise value_error("layers", "have equal batches and heads", got, hint=hint)
        return torch.stack(values_by_layer)

    def to_rows(self) -> list[TableRow]:
        """Return a table with a row for each statistic of each head, as a list of dicts for ``pandas.DataFrame``.

        A row contains ``layer`` (name), ``layer_index``, ``run``, ``batch`` (item), ``head`` (as numbered in the
        model), ``statistic``, ``unit``, ``value`` and ``uniform``, the value for uniform attention under the same mask.
        The table contains the measures of `Run.summary`. For each statistic in ``keep`` with a number per query, it
        also contains the mean over the queries that may attend to at least one key. NaN marks a head whose queries
        attend to nothing, and a baseline that is undefined or unknown. All calls of a generation form one run.

        Raises:
            UnsupportedError: no statistic with a number for each head was recorded.

        Cost: the same as `Run.summary` for each run.

        Example:
            >>> from torch import nn
            >>> from saccade import record
            >>> layer = nn.TransformerEncoderLayer(8, 2, batch_first=True).eval()
            >>> with record(layer) as recording:
            ...     out = layer(torch.zeros(1, 4, 8))
            >>> row = recording.to_rows()[0]
            >>> row["layer"], row["head"], row["statistic"], round(row["value"], 3), round(row["uniform"], 3)
            ('self_attn', 0, 'entropy', 1.386, 1.386)
        """
        return table_rows(dict(self._runs), self._heads)

    def to_csv(self, path: str | os.PathLike[str]) -> Path:
        """Write the table of `to_rows` as CSV, in UTF-8 with a header; NaN is an empty cell. Return the path.

        An existing file is replaced when the new one is complete.

        Raises:
            TypeError, ValueError: the path does not name a file in an existing folder.
            UnsupportedError: see `to_rows`.
            OSError: the file cannot be written.
        """
        destination = checked_file(path)
        write_csv(destination, COLUMNS, self.to_rows())
        return destination

    def to_parquet(self, path: str | os.PathLike[str]) -> Path:
        """Write the table of `to_rows` as a Parquet file, with pyarrow or with pandas and fastparquet; return the path.

        An existing file is replaced when the new one is complete.

        Raises:
            TypeError, ValueError: the path does not name a file in an existing folder.
            ImportError: no package that writes Parquet is installed.
            UnsupportedError: see `to_rows`.
            OSError: the file cannot be written.
        """
        destination, convert = checked_file(path), parquet_writer()
        write_parquet(destination, self.to_rows(), convert)
        return destination

    def find(
        self,
        pairs: Iterable[tuple[Place, Place]],
        *,
        tokens: Tokens = None,
        batch: int = 0,
        k: int | None = 10,
        rank_by: RankBy = "value",
    ) -> list[Link]:
        """Rank heads by the attention between pairs of words, such as a pronoun and its noun, largest first.

        The attention of a pair goes from the first word to the second. It is summed over the second word's tokens,
        averaged over the first word's tokens, and then averaged over the pairs.

        Args:
            pairs: pairs (query word, key word). A word must occur once in the text; specify other words by the index of
                their token, or by a ``range`` of indices.
            tokens: the tokens of the text, ``tokenizer.convert_ids_to_tokens(ids[0])``; for two texts, a pair (query
                tokens, key tokens); or a dict from layer names to either, as in `saccade.viz.report`, in which case
                layers that match no name are skipped. When None, pairs must consist of token indices.
            batch: the batch item.
            k: number of heads to return; None for all.
            rank_by: "value": the attention itself. "excess": the attention minus ``expected``, the value if the first
                word attended to the second as queries do on average (the mean attention that the second word receives,
                scaled to the number of keys that each query sees). A head in which every query attends to the second
                word then ranks low.

        Raises:
            TypeError, ValueError: pairs are not pairs of words or tokens of the text, a word does not occur or occurs
                several times, or every pair is masked.
            UnsupportedError: queries and keys were not recorded (``keep="qk"``).

        Cost: the rows of the query tokens in each layer, O(tokens · kv_len) for each head; with "excess", one pass
        over the whole matrix and one over uniform attention.

        Example:
            >>> from saccade import models, record
            >>> model = models.small_decoder()
            >>> text = model.tokenizer.encode("The cat saw the dog, and it ran away.")
            >>> with torch.no_grad(), record(model, keep="qk") as recording:
            ...     out = model(torch.tensor([text.ids]))
            >>> best = recording.find([("it", "cat")], tokens=text.tokens)[0]
            >>> best.value > best.uniform
            True
        """
        if k is not None:
            check_int("k", k)
        last = {name: self[name] for name in self}
        return rank_links(last, pairs, tokens, check_int("batch", batch, 0), self._heads, rank_by)[:k]

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
        lines += [f"    {name}: ran but was not recorded ({kind})" for name, kind in tuple(self._not_recorded.items())]
        return "\n".join([f"Recording of {len(self)} layers", *lines])

    def _name(self, layer: str | int) -> str:
        names = list(self._runs)
        if is_integer(layer) and -len(names) <= layer < len(names):
            return names[layer]
        if layer in self._runs:
            return str(layer)
        available = ", ".join(names) or "none, since nothing was recorded"
        raise KeyError(f"Recording: layer must be one of {available}; got {layer!r}.")
