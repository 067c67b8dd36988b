"""The data of one recording for a page, as numbers and compressed bytes."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from saccade.statistics import InductionMass, Measure, Statistic
from saccade.support.errors import value_error
from saccade.text import visible
from saccade.viz.page.encoding import as_json, halves, largest_weights, levels, packed
from saccade.viz.page.layers import Head, Map, Source
from saccade.viz.page.texts import Labels, Tokens, labels_of, shown_tokens

_BINS = 128  # maximum number of cells on each side of a head's small map
_FINE_BINS = 1024  # maximum number of cells on each side of the large map
_MAX_STRONGEST, _MIN_STRONGEST = 64, 8  # largest and smallest number of strongest weights per token
_SINKS = 8  # maximum number of keys of a layer that the page can hide
_SINK_SHARE, _SINK_TIMES = 0.05, 4.0
_BYTES_PER_WEIGHT = 5.6  # bytes of a weight and its index, after compression and base64
_CELL_FACTOR = 1.2  # upper bound for the bytes of a large map's cell, relative to a small map's
_RANKED_BY = ("position_information", "previous_mass", "induction_mass", "first_mass", "distance", "effective_tokens")


class Side(NamedTuple):
    """The data of one recording on a page.

    Attributes:
        descriptions: names and settings of the token sequences, layers and heads.
        parts: compressed data by name: the maps of each layer, and the details of heads.
    """

    descriptions: dict[str, Any]
    parts: dict[str, str]


class _Layer(NamedTuple):
    name: str
    source: Source
    labels: Labels
    measures: list[Measure]
    received: Tensor | None
    sinks: list[int]
    columns: list[int]  # the columns of the small map that contain sinks
    map: Map | None


def checked_labels(
    layers: dict[str, Source], tokens: Tokens, item: int, heads: Sequence[tuple[int, int]] | None
) -> dict[str, Labels]:
    """Return the tokens of all layers on a page; raise an error if tokens, batch item or heads are invalid.

    Raises:
        TypeError, ValueError: tokens, batch item or heads do not match the layers.
    """
    for name, layer in layers.items():
        if item >= layer.shape[0]:
            raise value_error("batch", f"be from 0 to {layer.shape[0] - 1} in layer {name}", item)
    counts = [layer.shape[1] for layer in layers.values()]
    for number, head in heads or ():
        if not (0 <= number < len(counts) and 0 <= head < counts[number]):
            rule = f"be (layer, head) of {len(counts)} layers, of {sorted(set(counts))} heads"
            raise value_error("heads", rule, (number, head))
    return {name: labels_of(tokens, name, *layer.shape[2:]) for name, layer in layers.items()}


def read_side(
    name: str,
    layers: dict[str, Source],
    labels: dict[str, Labels],
    item: int,
    heads: Sequence[tuple[int, int]] | None,
    size: int,
) -> Side:
    """Compute the page data of one recording from all its layers.

    Args:
        name: name of the recording.
        layers: layers by name.
        labels: the tokens of the layers, already checked.
        item: the batch item to show.
        heads: (layer, head) pairs to show in detail; the most informative heads if None.
        size: approximate size limit of the page in bytes.

    Cost: about three passes over each matrix, plus one over each head with details.
    """
    read = [_layer(one, layer, labels[one], item) for one, layer in layers.items()]
    texts: dict[tuple[str, ...], int] = {}
    index: dict[str, Any] = {"name": visible(name), "measures": _describe_measures(read), "layers": []}
    parts: dict[str, str] = {}
    for number, layer in enumerate(read):
        index["layers"].append(_describe_layer(layer, texts))
        if layer.map is not None:
            tops, signed = largest_weights(layer.map.cells), layer.source.is_signed
            both = (layer.map.cells, layer.map.beside)
            parts[f"maps-{number}"] = packed(
                b"".join(
                    levels(cells[head], top, is_signed=signed).tobytes()
                    for cells in both
                    for head, top in enumerate(tops)
                )
            )
            index["layers"][number] |= {"cells": layer.map.cells.shape[1:], "tops": tops, "sinkColumns": layer.columns}
    index["texts"] = [shown_tokens(text) for text in texts]
    left = size - sum(map(len, [packed(as_json(index)), *parts.values()]))
    cells = [_cell_bytes(layer, parts.get(f"maps-{number}", "")) for number, layer in enumerate(read)]
    order, k, is_sure = _choose_details(read, cells, heads, left)
    for number, head in order:
        described, part = _head_details(read[number], item, head, k)
        left -= len(part)
        if left < 0 and not is_sure:
            break
        index["layers"][number]["close"][head] = described
        parts[f"head-{number}-{head}"] = part
    index["start"] = next(iter(heads or _most_informative(read)))
    return Side(index, parts)


def _layer(name: str, source: Source, labels: Labels, item: int) -> _Layer:
    received = source.received(item)
    sinks = [] if received is None else _sinks(received.cpu().double().nan_to_num(0.0).mean(0))
    kv_len = source.shape[3]
    columns = sorted({sink * min(_BINS, kv_len) // kv_len for sink in sinks})
    statistics: list[Statistic[Any, Any]] = []
    numbers = {token: number for number, token in enumerate(dict.fromkeys(labels.keys))}
    if labels.is_one_text and len(numbers) < kv_len:  # otherwise no token repeats, or the tokens are unknown
        statistics = [InductionMass(tuple(numbers[token] for token in labels.keys))]
    maps = source.map(item, _BINS, _keys_without_sinks(columns, sinks, kv_len, _BINS), statistics)
    measures = source.measures(item)
    if maps is not None and maps.answers:
        mass = maps.answers[0][0].cpu().double().mean(-1)[None]
        meaning = "given to tokens that followed the same token before"
        measures.append(Measure("induction_mass", "share", meaning, mass, torch.full_like(mass, torch.nan)))
    known = columns if maps is not None and maps.beside.shape[2] else []
    return _Layer(name, source, labels, measures, received, sinks, known, maps)


def _sinks(received: Tensor) -> list[int]:
    """Return the attention sinks of a layer on a page, at most eight keys, strongest first.

    A key is a sink if it receives at least 5 % of the layer's attention, and at least four times the average.
    """
    shares = received / received.sum().clamp_min(1e-30)
    least = max(_SINK_SHARE, _SINK_TIMES / len(shares))
    best = shares.topk(min(_SINKS, len(shares)))
    return [int(key) for share, key in zip(best.values, best.indices, strict=True) if share >= least]


def _keys_without_sinks(
    columns: Sequence[int], sinks: Sequence[int], kv_len: int, bins: int
) -> tuple[tuple[int, ...], ...]:
    """Return the keys in each of the given columns of a page's pooled map, excluding attention sinks."""
    count = min(bins, kv_len)
    spans = [range(-(-column * kv_len // count), -(-(column + 1) * kv_len // count)) for column in columns]
    return tuple(tuple(key for key in span if key not in sinks) for span in spans)


def _describe_measures(layers: Sequence[_Layer]) -> list[dict[str, str]]:
    """Return the names, units and meanings of all statistics on a page."""
    measures: dict[str, Measure] = {}
    for layer in layers:
        for measure in layer.measures:
            measures.setdefault(measure.name, measure)
    return [{"name": measure.name, "unit": measure.unit, "meaning": measure.meaning} for measure in measures.values()]


def _describe_layer(layer: _Layer, texts: dict[tuple[str, ...], int]) -> dict[str, Any]:
    """Return the description of a layer for the page, and add the layer's token sequences to ``texts``."""
    _, heads, q_len, kv_len = layer.source.shape
    keys = texts.setdefault(layer.labels.keys, len(texts))
    queries = keys if layer.labels.is_one_text else texts.setdefault(layer.labels.queries, len(texts))
    return {
        "name": visible(layer.name),
        "heads": heads,
        "queries": q_len,
        "keys": kv_len,
        "queryText": queries,
        "keyText": keys,
        "first": kv_len - q_len if layer.labels.is_one_text else 0,
        "signed": layer.source.is_signed,
        "how": "max" if layer.map is None else layer.map.how,
        "values": {measure.name: measure.values[0].tolist() for measure in layer.measures},
        "uniform": {measure.name: measure.uniform[0].tolist() for measure in layer.measures},
        "sinks": layer.sinks,
        "close": {},
    }


def _choose_details(
    layers: Sequence[_Layer], cells: Sequence[float], heads: Sequence[tuple[int, int]] | None, left: int
) -> tuple[Iterable[tuple[int, int]], int, bool]:
    """Choose the heads that a page shows in detail, and the number of weights per token.

    If all weights of all heads fit into ``left`` bytes, all of them are shown. Otherwise each token gets as many of its
    strongest weights as fit. If not even the smallest number fits for all heads, the page shows as many heads as fit.

    Return three values: the heads as (layer, head), the number of weights per token, and whether all of these heads are
    shown regardless of the size.
    """
    every = [(number, head) for number, layer in enumerate(layers) for head in range(layer.source.shape[1])]
    chosen = every if heads is None else list(dict.fromkeys((int(layer), int(head)) for layer, head in heads))
    longest = max(layer.source.shape[3] for layer in layers)
    for k in (longest, _MAX_STRONGEST, 32, 16, _MIN_STRONGEST):
        if k <= longest and sum(_detail_bytes(layers[number], cells[number], k) for number, _ in chosen) <= left:
            return chosen, k, True
    return (_most_informative(layers) if heads is None else chosen), min(_MIN_STRONGEST, longest), heads is not None


def _most_informative(layers: Sequence[_Layer]) -> Iterator[tuple[int, int]]:
    """Yield all heads on a page, most informative first: the best by each statistic, then the second best, etc."""
    orders = []
    for name in _RANKED_BY:
        values = {
            (number, head): value
            for number, layer in enumerate(layers)
            for measure in layer.measures
            if measure.name == name
            for head, value in enumerate(measure.values[0].tolist())
        }
        orders.append(sorted(values, key=lambda head: -np.nan_to_num(values[head], nan=-np.inf)))
    every = [(number, head) for number, layer in enumerate(layers) for head in range(layer.source.shape[1])]
    heads = (order[rank] for rank in range(len(every)) for order in [*orders, every] if rank < len(order))
    yield from dict.fromkeys(heads)


def _head_details(layer: _Layer, item: int, head: int, k: int) -> tuple[dict[str, Any], str]:
    """Return a description of one head's details for a page, and their compressed data."""
    _, _, q_len, kv_len = layer.source.shape
    bins = min(_FINE_BINS, max(q_len, kv_len))
    columns = sorted({sink * min(bins, kv_len) // kv_len for sink in layer.sinks})
    k = min(k, kv_len)
    details: Head = layer.source.head(item, head, bins, _keys_without_sinks(columns, layer.sinks, kv_len, bins), k)
    described: dict[str, Any] = {"k": 0, "top": 0.0}
    pieces: list[bytes] = []
    if details.map is not None and max(q_len, kv_len) > _BINS:
        top = largest_weights(details.map.cells)[0]
        described |= {"cells": details.map.cells.shape[1:], "fineTop": top, "sinkColumns": columns}
        pieces += [
            levels(cells[0], top, is_signed=layer.source.is_signed).tobytes()
            for cells in (details.map.cells, details.map.beside)
        ]
    if details.strong is not None:
        strong = details.strong
        top = max(float(torch.nan_to_num(strong.weights).abs().max()), 0.0)
        described |= {"k": strong.weights.shape[-1], "back": strong.received.shape[-1], "top": top}
        # Recorded results may lack weights below 0 and count them as missing.
        described["whole"] = kv_len <= described["k"] == described["back"]
        for weights, indices in ((strong.weights, strong.keys), (strong.received, strong.queries)):
            pieces += [halves(weights[0, 0].cpu().numpy(), top), _encode_indices(indices[0, 0])]
    if layer.received is not None:
        received = layer.received[head].float().cpu().numpy()
        described["mostReceived"] = float(np.abs(np.nan_to_num(received)).max())
        pieces.append(halves(received, described["mostReceived"]))
    return described, packed(b"".join(pieces))


def _encode_indices(indices: Tensor) -> bytes:
    """Encode the key or query indices of strong weights for a page as uint32.

    Indices are increased by one, so that 0 stands for a missing weight.
    """
    return (indices + 1).cpu().numpy().astype("<u4").tobytes()


def _cell_bytes(layer: _Layer, maps: str) -> float:
    """Estimate how many bytes a cell of a large map takes on the page, from the size of the small maps.

    If there are no small maps, return 0.
    """
    return 0.0 if layer.map is None else _CELL_FACTOR * len(maps) / layer.map.cells.size


def _detail_bytes(layer: _Layer, cell: float, k: int) -> int:
    _, _, q_len, kv_len = layer.source.shape
    fine = 0 if max(q_len, kv_len) <= _BINS else min(_FINE_BINS, q_len) * min(_FINE_BINS, kv_len) * cell
    return int(fine + _BYTES_PER_WEIGHT * (q_len + kv_len) * min(k, kv_len) + 2.5 * kv_len)
