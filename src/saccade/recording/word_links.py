"""Rank heads by how strongly they link pairs of words, that is, by the attention from one word to the other."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from fnmatch import fnmatchcase
from typing import Literal, NamedTuple, get_args

import torch
from torch import Tensor

from saccade.matrix import Matrix
from saccade.recording.layer_record import Run
from saccade.statistics.summary import index_of_received
from saccade.support.errors import kind, shown, type_error, value_error
from saccade.support.validation import check_choice, is_integer
from saccade.text import locate
from saccade.viz.page.texts import Labels, Tokens, check_tokens, labels_of

CALLED_AS = "find"  # in errors

Place = str | int | range
"""A word of the text, the index of its token, or the range of indices of its tokens."""
RankBy = Literal["value", "excess"]
"""The measure that ranks heads: the attention between the words, or its excess over that of an average query."""


class Link(NamedTuple):
    """One entry in a ranking of heads by how strongly they link pairs of words.

    Attributes:
        layer: name of the layer.
        layer_index: index of the layer, in the order in which layers are first called.
        head: index of the head, as numbered in the model.
        value: attention from the first word to the second, averaged over the pairs, from 0 to 1.
        uniform: the same average for uniform attention under the mask.
        weights: the attention of each pair.
        expected: the value if the first word attended to the second as queries do on average; None unless heads are
            ranked by ``excess``.
    """

    layer: str
    layer_index: int
    head: int
    value: float
    uniform: float
    weights: tuple[float, ...]
    expected: float | None = None


class _Layer(NamedTuple):
    """A layer's recorded matrix, with the rows and columns of each word pair in it."""

    number: int
    name: str
    matrix: Matrix
    ranges: list[tuple[range, range]]


def rank_links(
    runs: Mapping[str, Run],
    pairs: Iterable[tuple[Place, Place]],
    tokens: Tokens,
    batch: int,
    heads: Sequence[int] | None,
    rank_by: RankBy = "value",
) -> list[Link]:
    """Rank all heads by the attention between pairs of words, largest first; see `Recording.find`.

    Args:
        runs: the last run of each layer by name.
        pairs, tokens, batch, rank_by: see `Recording.find`.
        heads: the recorded heads; None for all.
    """
    excess = check_choice("rank_by", rank_by, get_args(RankBy)) == "excess"
    checked = _checked_pairs(pairs)
    check_tokens(tokens)
    links = [
        link
        for layer in _layers(runs, checked, tokens, batch)
        for link in _links_of(layer, len(checked), batch, heads, excess)
    ]
    if all(link.uniform == 0 for link in links):
        rule = "be a query and a key that the mask allows"
        hint = (
            "attention goes from the first word to the second; in a causal model the second word is earlier in the text"
        )
        raise value_error("each of pairs", rule, ", ".join(map(shown, checked)), hint=hint)
    return sorted(links, key=lambda link: (link.expected or 0.0) - link.value)


def _layers(runs: Mapping[str, Run], pairs: list[tuple[Place, Place]], tokens: Tokens, batch: int) -> Iterator[_Layer]:
    patterns = [*map(str, tokens)] if isinstance(tokens, Mapping) else ["*"]
    chosen = {name: run for name, run in runs.items() if any(fnmatchcase(name, pattern) for pattern in patterns)}
    if not chosen:
        rule = f"have a pattern that matches one of {', '.join(runs)}"
        raise value_error("tokens", rule, ", ".join(patterns), hint="'*' matches all layers")
    numbers = {name: index for index, name in enumerate(runs)}
    for name, run in chosen.items():
        items, _, q_len, kv_len = run.shape
        if not 0 <= batch < items:
            raise value_error("batch", f"be from 0 to {items - 1}", batch)
        labels = labels_of(tokens, name, q_len, kv_len)
        ranges = [_ranges(pair, labels, tokens is not None) for pair in pairs]
        yield _Layer(numbers[name], name, run.matrix, ranges)


def _links_of(layer: _Layer, count: int, batch: int, heads: Sequence[int] | None, excess: bool) -> Iterator[Link]:
    """Yield the `Link` of each head of a layer."""
    uniform_matrix = layer.matrix.uniform()
    both = (layer.matrix, uniform_matrix)
    attention, uniform_attention = (_between(matrix, layer.ranges, batch) for matrix in both)
    expected_values: Sequence[float | None] = [None] * len(attention)
    if excess:
        received_index = index_of_received(*(matrix.received()[batch].detach() for matrix in both))
        expected_values = _between(uniform_matrix, layer.ranges, batch, received_index).mean(-1).tolist()
    rows = zip(attention.tolist(), uniform_attention.tolist(), expected_values, strict=True)
    for index, (weights, baselines, expected) in enumerate(rows):
        head = index if heads is None else heads[index]
        value, uniform = sum(weights) / count, sum(baselines) / count
        yield Link(layer.name, layer.number, head, value, uniform, tuple(weights), expected)


def _between(matrix: Matrix, ranges: list[tuple[range, range]], batch: int, factors: Tensor | None = None) -> Tensor:
    """Return the attention between ranges of tokens, ``[heads, pairs]``: summed over keys, averaged over queries.

    Args:
        factors: ``[heads, kv_len]``, multiplied by the attention to each key; 1 when None.
    """
    sums = []
    for rows, keys in ranges:
        weights = matrix[batch, :, rows.start : rows.stop, keys.start : keys.stop]
        if factors is not None:
            weights = weights * factors[:, None, keys.start : keys.stop]
        sums.append(weights.sum(-1).mean(-1))
    return torch.stack(sums, -1).detach()


def _checked_pairs(pairs: object) -> list[tuple[Place, Place]]:
    rule, hint = (
        "be pairs (query word, key word)",
        'pairs=[("it", "camera")]; token indices and ranges are also accepted',
    )
    if isinstance(pairs, str) or not isinstance(pairs, Iterable):
        raise type_error("pairs", rule, kind(pairs), hint=hint)
    checked: list[tuple[Place, Place]] = []
    for pair in pairs:
        if isinstance(pair, str) or not isinstance(pair, Sequence) or isinstance(pair, range) or len(pair) != 2:
            raise type_error("pairs", rule, shown(pair), hint=hint)
        for place in pair:
            if not (is_integer(place) or isinstance(place, str | range)):
                raise type_error("pairs", rule, shown(pair), hint=hint)
        checked.append((pair[0], pair[1]))
    if not checked:
        raise value_error("pairs", "contain at least one pair", "none")
    return checked


def _ranges(pair: tuple[Place, Place], labels: Labels, has_tokens: bool) -> tuple[range, range]:
    """Return the rows and the columns of a word pair in a layer's matrix."""
    query, key = pair
    offset = len(labels.keys) - len(labels.queries) if labels.is_one_text else 0
    text = labels.keys if labels.is_one_text else labels.queries
    rows = _tokens_of(query, text, has_tokens)
    if rows.start < offset:
        got = f"{shown(query)} at token {rows.start}"
        raise value_error("each of pairs", f"have a recorded query, at token {offset} or later", got)
    return range(rows.start - offset, rows.stop - offset), _tokens_of(key, labels.keys, has_tokens)


def _tokens_of(place: Place, text: Sequence[str], has_tokens: bool) -> range:
    """Return the range of token indices that a word covers."""
    if isinstance(place, str):
        if not has_tokens:
            hint = "with tokens=tokenizer.convert_ids_to_tokens(ids[0]), pairs can be words"
            raise value_error("pairs", "be token indices if tokens= is not given", repr(place), hint=hint)
        return locate(place, text)
    tokens = place if isinstance(place, range) else range(place, place + 1)
    if tokens.step != 1 or not 0 <= tokens.start < tokens.stop <= len(text):
        raise value_error("each of pairs", f"be tokens from 0 to {len(text) - 1}", place)
    return tokens
