"""Claims about sparse masks as graphs of tokens: stars, diameters, edges."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from saccade.masks import Global, Mask, Random, Window, bigbird
from saccade.theory.claim import Draw, claim
from saccade.theory.measurement import Measurements, apart, at_least, at_most, equal


def contains_star(allowed: Tensor) -> bool:
    """Return whether a mask contains a star graph: self-loops, and a token linked with all in both directions."""
    centres = allowed.all(0) & allowed.all(1)
    return bool(centres.any() and allowed.diagonal().all())


def diameter(allowed: Tensor) -> int:
    """Return the diameter of a mask's graph: the number of layers after which every token can depend on every other.

    The diameter is -1 if no number of layers is enough.
    """
    reached, layers = allowed, 1
    while not reached.all():
        further = (reached.float() @ allowed.float()) > 0
        if torch.equal(further, reached):
            return -1
        reached, layers = further, layers + 1
    return layers


def _bigbird(seed: int) -> Mask:
    return bigbird(4, global_blocks=1, random_blocks=2, seed=seed)


@claim(
    latex=r"D\supseteq S\ \Rightarrow\ \text{universal approximation},\quad|D|=O(n)",
    source="Zaheer et al. 2020, arXiv:2007.14062, theorem 1; what a run can check is the condition, not the theorem",
    verdict="holds if",
    conditions="there is a global token: the theorem requires a star (a token that attends to all, and to which all "
    "attend), compact inputs of a fixed length, positions, and as many layers as it takes",
)
def bigbird_has_what_the_theorem_needs(draw: Draw, *, pattern: Callable[[int], Mask] = _bigbird) -> Measurements:
    """BigBird's pattern keeps the universality of full attention with linearly many pairs."""
    mask = pattern(draw.integer())
    allowed = mask.to_dense(128)[0, 0]
    yield equal("contains a star", contains_star(allowed), True)
    yield at_most("layers until every token can reach every other, n = 128", diameter(allowed), 2)
    pairs = [int(mask.to_dense(n).sum()) for n in (256, 512)]
    yield equal(
        "growth of the pairs for twice the length", pairs[1] / pairs[0], 2.0, 0.5, "random blocks; all pairs would be 4"
    )
    full = torch.ones(128, 128, dtype=torch.bool)
    yield at_most("pairs, n = 128, as a share of all", int(allowed.sum()) / full.numel(), 0.3)


@claim(
    latex=r"\text{window}+\text{random}\ \Rightarrow\ \text{universal}",
    source="summaries of Zaheer et al. 2020, arXiv:2007.14062, whose theorem 1 requires the star; proposition 1 "
    "there bounds what few pairs can do in few layers",
    verdict="refuted",
    conditions="the theorem says nothing about them: they contain no star, and a window alone takes n/w layers to "
    "join the ends. One global token is enough for both",
)
def windows_and_random_keys_suffice(
    draw: Draw,
    *,
    pattern: Callable[[int], Mask] = lambda seed: Window(4, 4) | Random(1, 4, seed),
    layers: Callable[[Tensor], int] = diameter,
) -> Measurements:
    """A window and random keys meet the conditions of the universal approximation theorem."""
    n = 128
    allowed = pattern(draw.integer()).to_dense(n)[0, 0]
    yield apart("contains a star", contains_star(allowed), True, 0.5)
    yield at_least("layers to join all tokens", layers(allowed), 3)
    window = Window(4, 4)
    yield equal("layers of the window alone, against (n - 1)/w", layers(window.to_dense(n)[0, 0]), 32)
    yield equal("with one global token: layers", layers((window | Global([0])).to_dense(n)[0, 0]), 2)
