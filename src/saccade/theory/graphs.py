"""Claims about sparse masks as graphs of tokens: stars, diameters, edges, and what layers with a window compute."""

from __future__ import annotations

import itertools
from collections.abc import Callable

import torch
from torch import Tensor

from saccade.masks import Global, Mask, Random, Window, bigbird, longformer
from saccade.matrix import attention
from saccade.support.language import Message
from saccade.theory.claim import Draw, claim
from saccade.theory.measurement import Measurements, at_least, at_most, equal


def contains_star(allowed: Tensor) -> bool:
    """Return whether a mask contains a star graph with self-loops.

    One token is linked to all others in both directions, and every token to itself.
    """
    centres = allowed.all(0) & allowed.all(1)
    return bool(centres.any() and allowed.diagonal().all())


def diameter(allowed: Tensor) -> int:
    """Return the diameter of a mask's graph, the number of layers after which every token can depend on all others.

    The diameter is -1 if no number of layers is enough.
    """
    reached, layers = allowed, 1
    while not reached.all():
        further = (reached.float() @ allowed.float()) > 0
        if torch.equal(further, reached):
            return -1
        reached, layers = further, layers + 1
    return layers


_WINDOW = Window(1, 1)


def _bigbird(seed: int) -> Mask:
    return bigbird(4, global_blocks=1, random_blocks=2, seed=seed)


def _longformer() -> Mask:
    mask: Mask = longformer(4, [0, 9])
    return mask


@claim(
    latex=r"D\supseteq S\ \Rightarrow\ \text{universal approximation},\quad|D|=O(n)",
    source="Zaheer et al. 2020, arXiv:2007.14062, theorem 1; what a run can check is the condition, not the theorem",
    verdict="holds if",
    conditions="inputs are compact and have a fixed length, positions are encoded, and there are as many layers as "
    "needed. A global token gives the pattern the star of the theorem (a token that attends to all, and to which all "
    "attend), which is enough, but not necessary: windows-and-random-keys-suffice",
)
def bigbird_has_what_the_theorem_needs(
    draw: Draw,
    *,
    pattern: Callable[[int], Mask] = _bigbird,
    windows_and_globals: Callable[[], Mask] = _longformer,
) -> Measurements:
    """BigBird's pattern preserves the universality of full attention with linearly many pairs."""
    mask = pattern(draw.integer())
    allowed = mask.to_dense(128)[0, 0]
    yield equal("contains a star", contains_star(allowed), True)
    yield at_most("layers until every token can reach every other, n = 128", diameter(allowed), 2)
    pairs = [int(mask.to_dense(n).sum()) for n in (256, 512)]
    yield equal(
        "growth of the pairs for twice the length",
        pairs[1] / pairs[0],
        2.0,
        0.15,
        "random blocks; all pairs would be 4",
    )
    joined = (Window(4, 4) | Global([0, 9])).to_dense(128)
    differing = int((windows_and_globals().to_dense(128) != joined).sum())
    yield equal("Longformer, against a window joined with global tokens: pairs that differ", differing, 0)
    within = (Window(1, 1) | Global([0])).to_dense(128)[0, 0]
    yield equal("BigBird: pairs of a window or a global token that it leaves out", int((within & ~allowed).sum()), 0)
    full = torch.ones(128, 128, dtype=torch.bool)
    yield at_most("pairs, n = 128, as a share of all", int(allowed.sum()) / full.numel(), 0.3)


def built_of_windows(tokens: Tensor, wanted: Tensor, layers: int, mask: Mask = _WINDOW) -> Tensor:
    """Run hand-built layers with a local mask that map each sequence to arbitrary targets, ``[sequences, n, width]``.

    Each token vector has one slot per sequence position, for the one-hot token at that position. Initially, only the
    slot of its own position is filled. In each layer, three heads attend to the previous token, the token itself and
    the next token. A feed-forward layer then takes the largest of the three for each entry, with
    max(a, b) = a + relu(b - a). The last layer has a hidden unit for each sequence and position.
    """
    count, n = tokens.shape
    positions = torch.eye(n, dtype=torch.float64)
    one_hot = torch.nn.functional.one_hot(tokens).double()
    filled = torch.einsum("bil,ip->bipl", one_hot, positions).flatten(2)  # [sequences, n, slots]
    wanted_position = torch.stack([(torch.arange(n) + step).clamp(0, n - 1) for step in (-1, 0, 1)])
    query, key = 50 * positions[wanted_position].expand(count, 3, n, n), positions.expand(count, 3, n, n)
    for _ in range(layers):
        value = filled[:, None].expand(count, 3, n, filled.shape[-1])
        before, here, after = attention(query, key, value, mask, scale=1.0).unbind(1)
        both = before + torch.relu(here - before)
        filled = both + torch.relu(after - both)
    matches = filled @ one_hot.flatten(1).T
    units = torch.relu(matches[:, :, None] + positions[None, :, :, None] - n)  # [sequences, n, position, sequence]
    return torch.einsum("bips,spc->bic", units, wanted)


@claim(
    latex=r"\text{window}+\text{random}\ \Rightarrow\ \text{universal, with at least}\ n/w\ \text{layers}",
    source="Yun et al. 2020, arXiv:2006.04862, theorem 1, which requires self-loops, a path through all tokens and "
    "enough layers to join them; summaries often name theorem 1 of Zaheer et al. 2020, arXiv:2007.14062",
    verdict="holds if",
    conditions="there are enough layers to join all tokens: n/w of them for a window of w on each side, fewer with "
    "random keys, two with a global token. The theorem about BigBird does not show it: that requires a star, "
    "which a window and random keys do not contain",
)
def windows_and_random_keys_suffice(
    draw: Draw,
    *,
    pattern: Callable[[int], Mask] = lambda seed: Window(4, 4) | Random(1, 4, seed),
    layers: Callable[[Tensor], int] = diameter,
    stack: Callable[[Tensor, Tensor, int], Tensor] = built_of_windows,
) -> Measurements:
    """A window and random keys are enough for universal approximation, without a global token."""
    tokens = torch.tensor(list(itertools.product(range(2), repeat=4)))
    wanted = draw.normal(16, 4, 2)
    for number, name in ((3, "three"), (2, "two")):
        error = float((stack(tokens, wanted, number) - wanted).abs().max())
        what = Message(
            "{name} layers of Window(1, 1), all 16 sequences of 4 places, random numbers: largest error",
            name=Message(name),
        )
        yield at_most(what, error, 1e-9) if number == 3 else at_least(what, error, 0.7)
    n = 128
    allowed = pattern(draw.integer()).to_dense(n)[0, 0]
    yield equal("contains a star, as the theorem about BigBird requires", contains_star(allowed), False)
    yield at_least("layers to join all tokens", layers(allowed), 3)
    window = Window(4, 4)
    yield equal("layers of the window alone, against (n - 1)/w", layers(window.to_dense(n)[0, 0]), 32)
    yield equal("with one global token: layers", layers((window | Global([0])).to_dense(n)[0, 0]), 2)
