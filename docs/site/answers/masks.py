"""The cost of each mask."""

from __future__ import annotations

import math
from functools import cache
from typing import NamedTuple

import torch

from answers.examples import MASKS, TOKENS
from answers.kernels import anywhere, ingredients_of
from answers.making import mask_named
from saccade.engine.kernels.kernel import Request


class MaskCost(NamedTuple):
    """Shares of the pairs of `TOKENS` tokens that are allowed and that kernels compute; tiles; pairs looked at."""

    allowed: float
    fused: float
    native: float
    tiles: int
    asked: int


@cache
def costs_of_masks() -> dict[str, MaskCost]:
    """Return the cost of each mask; nothing is computed."""
    found = {}
    with anywhere() as kernels:
        by_name = {kernel.name: kernel for kernel in kernels}
        for name in MASKS:
            given = ingredients_of(TOKENS, torch.float32, mask_named(name))
            pieces = {
                strip.partial: tile.height * len(strip.keys)
                for tile in given.plan.tiles
                for strip in tile.columns
                if strip.partial is not True
            }
            runs = not by_name["native"].verdict(given, Request(impl="native")).cannot
            shares = [
                by_name[one].pairs(given) / math.prod(given.shape) if runs or one == "fused" else math.nan
                for one in ("fused", "native")
            ]
            allowed = mask_named(name).density(TOKENS)
            found[name] = MaskCost(allowed, *shares, len(given.plan), sum(pieces.values()))
    return found
