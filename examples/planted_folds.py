"""Families of sequences whose columns covary at the contacts of a planted fold, generated without any download.

A fold is a compact walk on a face-centred cubic lattice, where twelve places touch each place and neighbours share
neighbours, as in a protein. A Potts model has a coupling wherever two residues touch: in part by a table of which
letters prefer each other, the same in all families like chemistry, in part by numbers of each pair. Sequences of a
family descend from one ancestor along a tree, so that many pairs of columns agree which only share their history.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

LETTERS = 8
APART = 6  # smallest distance along the chain: nearer residues touch in nearly every fold
STEPS = np.array([s for s in np.ndindex(3, 3, 3) if sum(abs(i - 1) for i in s) == 2]) - 1


class Families(NamedTuple):
    """``letters [families, sequences, residues]``, and contacts, bool ``[families, residues, residues]``."""

    letters: Tensor
    touches: Tensor


def fold(length: int, rng: np.random.Generator, compactness: float = 1.0) -> np.ndarray:
    """Draw the positions ``[length, 3]`` of a self-avoiding walk that prefers contacts."""
    while True:
        walk = [(0, 0, 0)]
        for _ in range(length - 1):
            free = [tuple(own) for own in np.array(walk[-1]) + STEPS if tuple(own) not in walk]
            if not free:
                break
            near = np.array([(np.abs(np.array(walk) - own).sum(1) == 2).sum() for own in free])
            odds = np.exp(compactness * near)
            walk.append(free[rng.choice(len(free), p=odds / odds.sum())])
        else:
            return np.array(walk)


def touching(places: np.ndarray) -> np.ndarray:
    """Return which residues are adjacent, bool ``[length, length]``."""
    between = np.abs(places[:, None] - places)
    return (between.sum(2) == 2) & (between.max(2) == 1)


def affinities() -> Tensor:
    """Draw the affinities of letters in all families, ``[letters, letters]``, symmetric, of mean 0 and variance 1."""
    table = np.random.default_rng(20).normal(size=(LETTERS, LETTERS))
    table = table + table.T
    return torch.from_numpy((table - table.mean()) / table.std()).float()


def families(seeds: range, length: int, doublings: int, coupling: float = 1.0, sweeps: float = 1.0) -> Families:
    """Draw a family for each seed, ``2 ** doublings`` sequences; each has another fold.

    Args:
        seeds: one for each fold; the first decides all the rest, hundred by hundred.
        length: residues.
        doublings: how often every line of descent splits in two.
        coupling: strength of the Potts model's couplings.
        sweeps: how often a residue is drawn anew between two splits, on average.
    """
    parts = [seeds[start : start + 100] for start in range(0, len(seeds), 100)]
    made = [_together(part, length, doublings, coupling, sweeps) for part in parts]
    return Families(*(torch.cat(own) for own in zip(*made, strict=True)))


def _together(seeds: range, length: int, doublings: int, coupling: float, sweeps: float) -> Families:
    touches = torch.from_numpy(np.stack([touching(fold(length, np.random.default_rng([1, s]))) for s in seeds]))
    draw = torch.Generator().manual_seed(seeds.start)
    count, shape = len(seeds), (len(seeds), length, length, LETTERS, LETTERS)
    own = torch.randn(shape, generator=draw)
    # Couplings are symmetric.
    above = torch.ones(length, length, dtype=torch.bool).triu()[..., None, None]
    own = torch.where(above, own, own.permute(0, 2, 1, 4, 3))
    couplings = coupling * (affinities() + own) / 2**0.5 * touches[..., None, None]
    # [families, residues, letters of the residue, residues * letters of the others]
    couplings = couplings.permute(0, 1, 3, 2, 4).flatten(3)
    fields = 0.5 * torch.randn(count, length, LETTERS, generator=draw)
    letters = torch.randint(LETTERS, (count, 1, length), generator=draw)
    letters = _evolved(letters, couplings, fields, 20.0, draw)
    for _ in range(doublings):
        letters = _evolved(letters.repeat_interleave(2, 1), couplings, fields, sweeps, draw)
    return Families(letters, touches)


def _evolved(letters: Tensor, couplings: Tensor, fields: Tensor, sweeps: float, draw: torch.Generator) -> Tensor:
    """Redraw residues one after the other from the conditional distributions of the Potts model."""
    state = torch.nn.functional.one_hot(letters, LETTERS).float()
    for _ in range(round(sweeps * letters.shape[2])):
        i = int(torch.randint(letters.shape[2], (), generator=draw))
        scores = state.flatten(2) @ couplings[:, i].transpose(1, 2) + fields[:, i, None]
        noise = -torch.log(-torch.log(torch.rand(scores.shape, generator=draw).clamp(1e-9, 1 - 1e-7)))
        state[:, :, i] = torch.nn.functional.one_hot((scores + noise).argmax(-1), LETTERS).float()
    return state.argmax(-1)
