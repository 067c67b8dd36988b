"""report(): an HTML report of any model's attention in one file, from an overview to single weights."""

from __future__ import annotations

import os
from collections.abc import Iterable, Sequence
from importlib.metadata import version
from pathlib import Path
from typing import Any, Literal, NamedTuple

import torch

from saccade.caches.files import write_whole
from saccade.support.argument_hints import argument_hints
from saccade.support.errors import kind, shown, type_error, value_error
from saccade.support.validation import check_choice, check_int, check_type, is_integer
from saccade.text import visible
from saccade.viz.page.document import document
from saccade.viz.page.encoding import as_json, packed
from saccade.viz.page.layers import layers_of
from saccade.viz.page.page_data import checked_labels, read_side
from saccade.viz.page.texts import Tokens, check_tokens

FORMAT = "saccade.report/1"
"""Identifies the format of a page's data."""
Language = Literal["en", "zh"]
_SIZE = 8_000_000


class Options(NamedTuple):
    """The options of a report, except for its data; see `report`."""

    tokens: Tokens = None
    title: str = "Attention"
    names: tuple[str, str] = ("first", "second")
    batch: int = 0
    heads: tuple[tuple[int, int], ...] | None = None
    language: Language | None = None
    size: int = _SIZE


@argument_hints({})
def report(
    given: object,
    path: str | os.PathLike[str],
    *,
    tokens: Tokens = None,
    other: object = None,
    other_tokens: Tokens = None,
    names: tuple[str, str] = ("first", "second"),
    title: str = "Attention",
    batch: int = 0,
    heads: Iterable[tuple[int, int]] | None = None,
    language: Language | None = None,
    size: int = _SIZE,
) -> Path:
    """Write an HTML report of attention, from all heads to single weights; it opens from disk and works offline.

    All heads are shown in a table of layers × heads, either coloured and sorted by a statistic or as small
    maps. Clicking a head opens its map, which can be zoomed and panned; pointing at a token highlights the tokens that
    it attends to and those that attend to it. Heads can be searched by kind or by similarity to another head, and
    tokens by their text; sinks can be hidden. The view is stored in the page's URL and can be saved as PNG, SVG and
    JSON.

    Every head has a map of at most 128 × 128 cells, each showing the largest weight in a group of neighbours (or
    the one farthest from 0, if weights have both signs). As many heads as fit into ``size`` also get details: all
    weights if the text is short; otherwise a map of at most 1,024 × 1,024 cells and the strongest 8 to 64 weights of
    every query and key. These weights are exact; a weight that is known only from a map cell is marked "at most".

    Args:
        given: a lazy matrix, or dense weights ``[batch, heads, q_len, kv_len]``; a list of these with one entry per
            layer, or a dict from layer names to them; or a `saccade.recording.Recording`, whose recorded results are
            shown (with ``keep="qk"``, everything can be shown).
        path: path of the HTML file; an existing file is replaced atomically.
        tokens: readable tokens, one for each key; for two sequences, a pair (query tokens, key tokens); or a
            dict from layer names to either of these, such as
            ``{"encoder*": source, "decoder*self*": target, "*": (target, source)}``, where the first matching name
            counts. If None, the page shows numbers.
        other: a second recording to compare with, such as one of a different model, a later checkpoint or another
            kernel.
        other_tokens: tokens of the second recording; ``tokens`` if None.
        names: names of the two recordings.
        title: title at the top of the page.
        batch: the batch item to show.
        heads: (layer, head) pairs to show in detail. If None, as many heads as fit are shown, the most informative of
            each kind first.
        language: language of the page, "en" or "zh"; if None, that of the reader's browser. The reader can change it.
        size: approximate size limit of the file in bytes. Small maps of all heads, and details of the heads passed in
            ``heads``, are always written.

    Returns:
        The path of the file.

    Raises:
        TypeError: the object cannot be shown, or tokens are not strings.
        ValueError: there are no layers, an axis is empty, the number of tokens is wrong, or a head or the batch item
            does not exist.
        OSError: the file cannot be written.

    Cost: about three passes over the weights of each layer, plus one for each head with details; memory linear in the
    lengths.

    Example:
        >>> import saccade as sc
        >>> x = torch.randn(1, 4, 6, 8)
        >>> sc.viz.report(sc.AttentionMatrix(x, x), "/tmp/attention.html", tokens="you can look at all of".split()).name
        'attention.html'
    """
    options = checked_options(tokens, title, names, batch, heads, language, size)
    destination = checked_path(path)
    write(destination, options, given, other, other_tokens)
    return destination


def checked_path(path: str | os.PathLike[str]) -> Path:
    """Return the path to write a report to; raise an error unless a file can be written there."""
    check_type("path", path, (str, os.PathLike), "be a path")
    destination = Path(path)
    if destination.is_dir() or not destination.parent.is_dir():
        raise value_error("path", "name a file in an existing folder", visible(str(path)))
    return destination


def checked_options(
    tokens: Tokens,
    title: object,
    names: object,
    batch: object,
    heads: Iterable[tuple[int, int]] | None,
    language: object,
    size: object,
) -> Options:
    """Check the options of a report that do not depend on its data, and return them."""
    check_type("title", title, str, "be a string")
    pair = tuple(names) if isinstance(names, Sequence) and not isinstance(names, str) else ()
    if len(pair) != 2 or not all(isinstance(name, str) for name in pair):
        raise type_error("names", "be two strings", shown(names))
    if language is not None:
        check_choice("language", language, ("en", "zh"))
    check_tokens(tokens)
    item, room = check_int("batch", batch, 0), check_int("size", size)
    return Options(tokens, title, pair, item, _pairs(heads), language, room)  # type: ignore[arg-type]


def _pairs(heads: object) -> tuple[tuple[int, int], ...] | None:
    if heads is None:
        return None
    rule = "be pairs (layer, head)"
    given = tuple(check_type("heads", heads, Iterable, rule))
    for pair in given:
        is_pair = isinstance(pair, Sequence) and len(pair) == 2
        if not (is_pair and all(map(is_integer, pair))):
            raise type_error("heads", rule, shown(pair))
    return tuple((int(layer), int(head)) for layer, head in given)


def write(
    path: Path,
    options: Options,
    given: object,
    other: object = None,
    other_tokens: Tokens = None,
    live: float = 0.0,
) -> None:
    """Write an HTML report whose options have been checked.

    If ``live`` is above 0, the page reloads itself every ``live`` seconds.
    """
    data = page_parts(options, given, other, other_tokens, live)
    write_whole(path, memoryview(document(visible(options.title), data).encode()))


def page_parts(
    options: Options, given: object, other: object = None, other_tokens: Tokens = None, live: float = 0.0
) -> dict[str, str]:
    """Return the compressed data of an HTML report, as a dict by name."""
    if other is None and other_tokens is not None:
        raise value_error("other_tokens", "be omitted without a second recording", kind(other_tokens))
    check_tokens(other_tokens)
    sources = [layers_of(data) for data in ((given,) if other is None else (given, other))]
    texts = [options.tokens, options.tokens if other_tokens is None else other_tokens]
    labels = [
        checked_labels(source, text, options.batch, options.heads) for source, text in zip(sources, texts, strict=False)
    ]
    share = (options.size - len(document(options.title, {}))) // len(sources)
    sides = [
        read_side(name, source, tokens, options.batch, options.heads, share)
        for name, source, tokens in zip(options.names, sources, labels, strict=False)
    ]
    index: dict[str, Any] = {
        "format": FORMAT,
        "title": visible(options.title),
        "language": options.language or "",
        "live": live,
        "start": dict(zip(("layer", "head"), sides[0].descriptions["start"], strict=True)),
        "versions": {"saccade": version("saccade-attention"), "torch": torch.__version__},
        "sides": [side.descriptions for side in sides],
    }
    parts = {f"{number}-{name}": data for number, side in enumerate(sides) for name, data in side.parts.items()}
    return {"index": packed(as_json(index)), **parts}
