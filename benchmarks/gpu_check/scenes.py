"""Sizes and masks to time, with the number of pairs each mask allows."""

from __future__ import annotations

import dataclasses
from typing import Literal

import torch
from torch import Tensor

from benchmarks.gpu_check.steps import Level
from saccade import masks

__all__ = ["Scene", "scenes"]

Kind = Literal["full", "causal", "window", "longformer", "documents", "decode"]
_WINDOW, _SIDE, _DOCUMENTS = 1024, 512, 32
_WIDTH = {"cuda": 128, "cpu": 64, "quick": 32}
_HEADS = {"cuda": (16, 16), "cpu": (2, 2), "quick": (2, 2)}
_GROUPED = {"cuda": (32, 8), "cpu": (4, 1), "quick": (4, 1)}
_SHRINK = {"cuda": 1, "cpu": 32, "quick": 64}  # lengths of a rehearsal are shorter by this
_LENGTHS: dict[Kind, tuple[int, ...]] = {
    "causal": (2048, 8192),
    "full": (2048, 8192),
    "window": (16_384, 65_536),
    "longformer": (16_384, 65_536),
    "documents": (32_768,),
    "decode": (32_768,),
}


@dataclasses.dataclass(frozen=True)
class Scene:
    """One attention to be timed.

    Attributes:
        kind: what the mask is.
        length: keys; queries too, but for "decode", which has one.
        heads: of queries, and of keys.
        width: of a head.
        size: keys in the window, of each side for "longformer"; the number of documents.
    """

    kind: Kind
    length: int
    heads: tuple[int, int]
    width: int
    size: int = 0

    def __str__(self) -> str:
        return f"{self.kind} {self.length:,}"

    @property
    def q_len(self) -> int:
        """The number of queries."""
        return 1 if self.kind == "decode" else self.length

    @property
    def documents(self) -> list[int]:
        """Lengths of the documents, all different, that together have the length of the sequence."""
        middle = self.length // self.size
        sizes = [middle + (i - self.size // 2) * (middle // (2 * self.size)) for i in range(self.size)]
        return [*sizes[:-1], self.length - sum(sizes[:-1])]

    @property
    def mask(self) -> masks.Mask | None:
        """The mask of saccade."""
        match self.kind:
            case "causal":
                return masks.Causal()
            case "window":
                return masks.sliding_window(self.size)
            case "longformer":
                return masks.longformer(self.size, [0])
            case "documents":
                return masks.Documents(self.documents, rule=masks.Causal())
        return None

    @property
    def pairs(self) -> int:
        """Pairs of a query and a key that the mask allows, in one head."""
        n, size = self.length, self.size
        match self.kind:
            case "causal":
                return n * (n + 1) // 2
            case "window":
                return size * n - size * (size - 1) // 2
            case "longformer":
                return (2 * size + 1) * n - size * (size + 1) + 2 * (n - size - 1)
            case "documents":
                return sum(each * (each + 1) // 2 for each in self.documents)
        return self.q_len * n

    def flops(self, *, backward: bool) -> float:
        """Operations of two products forward, and of five more backward."""
        return 4.0 * self.heads[0] * self.pairs * self.width * (3.5 if backward else 1.0)

    def tensors(self, device: str) -> list[Tensor]:
        """Return random query, key and value in bfloat16."""
        drawn = torch.Generator(device).manual_seed(0)
        shapes = [(self.heads[0], self.q_len), (self.heads[1], self.length), (self.heads[1], self.length)]
        return [
            torch.randn(1, *shape, self.width, generator=drawn, device=device).to(torch.bfloat16) for shape in shapes
        ]


def scenes(level: Level) -> list[Scene]:
    """Return what is timed, the shorter lengths first."""
    shrink, found = _SHRINK[level], []
    sizes = {"window": max(1, _WINDOW // shrink), "longformer": max(1, _SIDE // shrink), "documents": _DOCUMENTS}
    if level != "cuda":
        sizes["documents"] = 4
    for place in range(2):
        for kind, lengths in _LENGTHS.items():
            if place < len(lengths):
                heads = _GROUPED[level] if kind == "decode" else _HEADS[level]
                found.append(Scene(kind, lengths[place] // shrink, heads, _WIDTH[level], sizes.get(kind, 0)))
    return found if level != "quick" else found[:6]
