"""A small causal model in which one thing may be wrong, and its runner."""

import copy
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn

from saccade.auditing.runner import Beside, Runner, Side, Unanswered

WINDOW = 6


class Cache:
    """Keys and values of each layer, and how many tokens came."""

    def __init__(self, fault: str):
        self.layers: list[tuple[Tensor, Tensor]] = []
        self.length, self.fault = 0, fault

    def __deepcopy__(self, memo: Any) -> "Cache":
        other = copy.copy(self)
        if self.fault != "fork":
            other.layers = list(self.layers)
        return other

    def crop(self, tokens: int) -> None:
        tokens -= self.fault == "crop"
        self.layers = [(k[:, : k.shape[1] - tokens], v[:, : v.shape[1] - tokens]) for k, v in self.layers]
        self.length -= tokens

    def reorder(self, rows: Tensor) -> None:
        if self.fault == "reorder":
            rows = rows.sort().values
        self.layers = [(k[rows], v[rows]) for k, v in self.layers]


class Small(nn.Module):
    """Two layers of one head; a token sees itself and the five before it."""

    def __init__(self, fault: str = ""):
        super().__init__()
        self.fault = fault
        self.tokens, self.places = nn.Embedding(101, 32), nn.Embedding(128, 32)
        self.projections = nn.ModuleList(nn.Linear(32, 96) for _ in range(2))
        self.dropout = nn.Dropout(0.1)
        self.norm = nn.BatchNorm1d(32, track_running_stats=False) if fault == "batch" else nn.LayerNorm(32)

    def forward(
        self,
        ids: Tensor,
        places: Tensor | None = None,
        real: Tensor | None = None,
        texts: Tensor | None = None,
        cache: Cache | None = None,
    ) -> Tensor:
        past = 0 if cache is None else cache.length
        if places is None:
            places = torch.arange(past, past + ids.shape[1]) + (self.fault == "position" and past > 0)
        x = self.tokens(ids) + self.places(places)
        for number, project in enumerate(self.projections):
            x = x + self.dropout(self._attend(number, project(self._normed(x)), past, real, texts, cache))
        if cache is not None:
            cache.length += ids.shape[1]
        return self._normed(x)

    def _normed(self, x: Tensor) -> Tensor:
        return self.norm(x.mT).mT if self.fault == "batch" else self.norm(x)

    def _attend(self, number: int, x: Tensor, past: int, real: Any, texts: Any, cache: Any) -> Tensor:
        query, key, value = x.chunk(3, -1)
        if cache is not None:
            if number < len(cache.layers):
                key, value = (
                    torch.cat([old, new], 1) for old, new in zip(cache.layers[number], (key, value), strict=True)
                )
            cache.layers[number : number + 1] = [(key, value)]
        q = torch.arange(x.shape[1])[:, None] + (0 if self.fault == "corner" else past)
        kv = torch.arange(key.shape[1])
        window = WINDOW - (self.fault == "short" and past > 0)
        allowed = (kv <= q) & (q - kv < (1 if self.fault == "training" and not self.training else window))
        if real is not None and self.fault != "padding":
            allowed = allowed & real[:, None, :]
        if texts is not None and self.fault != "texts":
            allowed = allowed & (texts[:, None] == texts)
        root = 33**0.5 if self.fault == "dtype" and x.dtype is torch.float32 else 32**0.5
        scores = (query @ key.mT / root).masked_fill(~allowed, torch.finfo(x.dtype).min)
        return scores.softmax(-1) @ value


class SmallRunner(Runner):
    """Runs it in every way."""

    model: Small

    @property
    def window(self) -> int:
        return WINDOW

    def padded(self, ids: Tensor, side: Side, pad: int) -> Tensor:
        batch, n = ids.shape
        real = torch.arange(n + pad).expand(batch, -1)
        real = real >= pad if side == "left" else real < n
        wide = torch.zeros(batch, n + pad, dtype=torch.long).masked_scatter(real, ids)
        rows = self.model(wide, (real.cumsum(1) - 1).clamp(min=0), real)
        return rows[:, pad:] if side == "left" else rows[:, :n]

    def packed(self, ids: Tensor, lengths: Sequence[int], *, beside: Beside = "positions") -> Tensor:
        places = torch.cat([torch.arange(length) for length in lengths])
        if beside not in ("positions", "a mask of ones"):
            raise Unanswered("it takes none")
        texts = torch.arange(len(lengths)).repeat_interleave(torch.tensor(lengths))
        return self.model(ids, places, torch.ones_like(ids, dtype=torch.bool) if beside != "positions" else None, texts)

    def start(self) -> Cache:
        return Cache(self.model.fault)

    def more(self, ids: Tensor, state: Cache) -> tuple[Tensor, Cache]:
        return self.model(ids, cache=state), state

    def cropped(self, state: Cache, tokens: int) -> Cache:
        state.crop(tokens)
        return state

    def reordered(self, state: Cache, rows: Tensor) -> Cache:
        state.reorder(rows)
        return state
