"""The mechanisms that each cache runs with, the distance from the dense run, and the bytes that it holds."""

from __future__ import annotations

import re
from functools import cache
from itertools import pairwise
from typing import NamedTuple

import torch
from torch import Tensor

import saccade as sc
from answers.examples import CACHES, FEW, LONG, MECHANISMS, SHORT, WIDTH
from answers.making import cache_named, mechanism_named, tokens
from answers.mechanisms import mechanisms_told
from saccade import masks, mechanisms, nn, scorers
from saccade.masks import Mask
from saccade.mechanisms import Mechanism
from saccade.mechanisms.entry_softmax import EntrySoftmax
from saccade.nn.block_compressor import BlockCompressor, BlockReader
from saccade.testing import error

# The mask that is joined with the causal one in the dense run of a cache; no mask at all for a context.
DENSE_RUNS: dict[str, Mask | None] = {
    "SinkWindowCache": masks.Causal() & masks.streaming(4, 8),
    "SegmentCache": masks.Causal() & masks.Segments(8, 4),
    "CrossCache": None,
}


@cache
def caches_run() -> dict[str, dict[str, float | str]]:
    """Return for each cache and mechanism the error of a prefill and steps against the dense run, or the refusal."""
    found: dict[str, dict[str, float | str]] = {}
    for name in CACHES:
        found[name] = {}
        for own in MECHANISMS:
            try:
                with torch.no_grad():
                    found[name][own] = _error_of(name, own)
            except sc.UnsupportedError as refused:
                found[name][own] = refused.reasons[0]
            except ValueError as refused:
                found[name][own] = _rule_of(refused)
    found["EntryCache"]["nn.CompressedAttention"] = _error_of_entries()
    return found


def _error_of(name: str, own: str) -> float:
    query, key, value = tokens()[:3]
    value = key if name.endswith(("LatentCache", "EntryCache")) else value
    mask = None if name == "CrossCache" else masks.Causal()
    made, parts = cache_named(name), []
    for start, stop in ((0, 12), (12, 13), (13, 17), (17, FEW)):
        rows = slice(start, stop)
        if name == "CrossCache":
            new = (None, None) if start else (key, value)
            parts.append(made.attend(mechanism_named(own, rows), query[:, :, rows], *new, mask=mask))
            continue
        mine = mechanism_named(own, rows, rows if name.startswith("Indexed") else slice(0, stop))
        parts.append(made.attend(mine, query[:, :, rows], key[:, :, rows], value[:, :, rows], mask=mask))
    dense = mechanism_named(own)(query, key, mask=DENSE_RUNS.get(name, mask)) @ value
    return error(torch.cat(parts, 2), dense)


@torch.no_grad()
def _error_of_entries() -> float:
    """Return how far a layer with an `EntryCache`, which supports no mechanism by itself, is from its full run."""
    torch.manual_seed(0)
    layer = nn.CompressedAttention(16, 2, head_dim=8, rotary_dim=0, block_size=8, window=16).double()
    cache, x = layer.new_cache(), torch.randn(1, FEW, 16, dtype=torch.float64)
    return error(torch.cat([layer(part, cache=cache) for part in x.split([12, 1, 4, FEW - 17], 1)], 1), layer(x))


def _rule_of(refused: Exception) -> str:
    """Return the rule of an argument, without the numbers of this case."""
    return re.sub(r"\b\d+ ", "", str(refused).partition(": ")[2].partition(";")[0])


class CacheSize(NamedTuple):
    """Bytes held after `SHORT` and `LONG` tokens, and read by the last step."""

    short: int
    long: int
    read: int


@cache
def sizes_of_caches() -> dict[str, CacheSize]:
    """Return sizes in float32, one key head of width 64, with the mechanism of the cache or else softmax."""
    found = {}
    for name in CACHES:
        told = mechanisms_told()
        kind = name.replace("IndexedLatent", "Indexed")  # with the same mechanism
        own = next((one for one in MECHANISMS if told[one].cache == kind), "Softmax")
        held = []
        for length in (SHORT, LONG):
            x, made = torch.zeros(1, 1, length, WIDTH), cache_named(name, WIDTH)
            ends = (0, length // 2, length - 1, length)  # so that room that is doubled is just as much as is needed
            for start, stop in pairwise(ends):
                rows = slice(start, stop)
                new = x[:, :, rows]
                both = (x, x) if name == "CrossCache" else (new, new)
                mask = None if name == "CrossCache" else masks.Causal()
                made.attend(
                    _reader(new) if name == "EntryCache" else _narrow(own, rows),
                    new,
                    *((None, None) if name == "CrossCache" and start else both),
                    mask=mask,
                )
            held.append(made.nbytes)
        found[name] = CacheSize(*held, made.traffic.bytes_read)
    return found


def _reader(new: Tensor) -> BlockReader:
    """Return a call of compressed attention that compresses these tokens in blocks of 8."""
    compressor = BlockCompressor(WIDTH, WIDTH, 8, False, 1e-6)
    return BlockReader(EntrySoftmax(8, 16), compressor, None, torch.cat([new, new], 3))


def _narrow(own: str, rows: slice) -> Mechanism:
    """Return a mechanism for one head, with index keys of 16 numbers."""
    if own != "TopK of index keys":
        made: Mechanism = mechanism_named(own, heads=1).float()
        return made
    few = rows.stop - rows.start
    narrow = torch.zeros(1, 1, few, 16)
    return mechanisms.TopK(scorers.LightningIndexer(narrow, narrow, narrow[..., 0]), 4)
