"""Reads a page's file as its documentation describes it, with none of the code that writes it."""

import base64
import json
import zlib
from html.parser import HTMLParser
from pathlib import Path

import numpy as np

import saccade as sc

__all__ = ["Close", "Page", "elements_of", "opened", "pooled", "written"]


class _Elements(HTMLParser):
    """All elements in order: (tag, attributes, the text within)."""

    def __init__(self):
        super().__init__(convert_charrefs=True)
        self.found, self.open = [], []

    def handle_starttag(self, tag, attrs):
        self.found.append([tag, dict(attrs), ""])
        if tag not in ("meta", "link"):
            self.open.append(self.found[-1])

    def handle_endtag(self, tag):
        assert self.open.pop()[0] == tag

    def handle_data(self, data):
        if self.open:
            self.open[-1][2] += data


def elements_of(text):
    parser = _Elements()
    parser.feed(text)
    parser.close()
    return parser.found


def opened(packed):
    """The bytes of a part: base64 of a zlib stream."""
    return zlib.decompress(base64.b64decode(packed, validate=True))


def weights_of(levels, top, signed):
    """Bytes as weights: six decades below the largest, NaN for 0."""
    levels = levels.astype(np.int64)
    ups, steps = (levels - 128, 126) if signed else (levels - 1, 253)
    sizes = np.where(ups == 0, 0.0, top * 10.0 ** (6 * ((np.abs(ups) - 1) / steps - 1)))
    return np.where(levels == 0, np.nan, np.sign(ups) * sizes)


def _refuse(name):
    raise ValueError(f"{name} is no JSON")


class Close:
    """One head closely; what is not there is None."""

    def __init__(self, layer, told, data):
        at = 0

        def take(count, kind):
            nonlocal at
            found = np.frombuffer(data, kind, count, at)
            at += found.nbytes
            return found.astype(np.float64) if kind == "<f2" else found

        self.map = self.beside = self.received = None
        if "cells" in told:
            rows, columns = told["cells"]
            made = [
                weights_of(take(rows * count, "u1").reshape(rows, count), told["fineTop"], layer["signed"])
                for count in (columns, len(told["sinkColumns"]))
            ]
            self.map, self.beside = made
        self.k = told["k"]
        if self.k:
            self.rows, self.columns = (
                (take(count * k, "<f2").reshape(count, k) * told["top"], take(count * k, "<u4").reshape(count, k) - 1.0)
                for count, k in ((layer["queries"], self.k), (layer["keys"], told["back"]))
            )
        if "mostReceived" in told:
            self.received = take(layer["keys"], "<f2") * told["mostReceived"]
        assert at == len(data)


class Page:
    """A page's data."""

    def __init__(self, path):
        self.text = path.read_text(encoding="utf-8") if isinstance(path, Path) else path
        self.parts = {
            attributes["data-part"]: text
            for tag, attributes, text in elements_of(self.text)
            if tag == "script" and "data-part" in attributes
        }
        self.index = json.loads(opened(self.parts["index"]), parse_constant=_refuse)

    def side(self, place=0):
        return self.index["sides"][place]

    def layer(self, layer=0, side=0):
        return self.side(side)["layers"][layer]

    def tokens(self, layer=0, side=0):
        """Tokens of a layer's queries and keys."""
        told, texts = self.layer(layer, side), self.side(side)["texts"]
        queries, keys = texts[told["queryText"]]["tokens"], texts[told["keyText"]]["tokens"]
        return queries[told["first"] : told["first"] + told["queries"]], keys

    def small(self, layer, head, side=0):
        """A head's small map, and its columns once more without sinks; None where there is none."""
        told = self.layer(layer, side)
        if "cells" not in told:
            return None
        (rows, columns), heads, few = told["cells"], told["heads"], len(told["sinkColumns"])
        data = np.frombuffer(opened(self.parts[f"{side}-maps-{layer}"]), "u1")
        assert data.size == heads * rows * (columns + few)
        maps = data[: heads * rows * columns].reshape(heads, rows, columns)
        beside = data[heads * rows * columns :].reshape(heads, rows, few)
        return tuple(weights_of(one[head], told["tops"][head], told["signed"]) for one in (maps, beside))

    def close(self, layer, head, side=0):
        told = self.layer(layer, side)
        own = told["close"].get(str(head))
        return None if own is None else Close(told, own, opened(self.parts[f"{side}-head-{layer}-{head}"]))


def written(folder, given, **options):
    """The page of something."""
    return Page(sc.viz.report(given, folder / "page.html", **options))


def pooled(weights, allowed, bins, without=()):
    """Return for every cell the allowed weight that is farthest from 0, or NaN; some keys may be left out."""
    rows, columns = (np.arange(n) * min(bins, n) // n for n in weights.shape)
    shown = np.where(allowed, weights.astype(float), np.nan)
    shown[:, list(without)] = np.nan
    places = tuple(np.broadcast_arrays(rows[:, None], columns))
    high, low = (np.full((rows[-1] + 1, columns[-1] + 1), np.nan) for _ in range(2))
    np.fmax.at(high, places, shown)
    np.fmin.at(low, places, shown)
    return np.where(-low > high, low, high)
