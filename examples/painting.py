"""Tools for drawing scenes: patches as tokens, a Markov model of patches, and a reader of digits."""

from __future__ import annotations

import collections
from typing import Any

import numpy as np
import torch
from torch import Tensor

import scenes

SIDE = 3  # side of a patch, in pixels


class Patches:
    """A codebook of patches of scenes, from k-means.

    Attributes:
        codes: ``[codes, 9]``; the first is paper.
        side: patches in a row, and rows.
    """

    def __init__(self, codes: Tensor):
        self.codes, self.side = codes, scenes.CANVAS // SIDE

    @classmethod
    def of(cls, images: Tensor, count: int) -> Patches:
        """Fit a codebook to the patches of some scenes."""
        from sklearn.cluster import KMeans  # noqa: PLC0415  a second of import that --help need not wait for

        cut = cls(torch.zeros(1, SIDE**2)).cut(images).flatten(0, 1)
        inked = np.unique(cut[cut.sum(1) > 0].numpy(), axis=0)
        means = KMeans(count - 1, n_init=1, random_state=0).fit(inked).cluster_centers_
        return cls(torch.cat([torch.zeros(1, SIDE**2), torch.from_numpy(means).float()]))

    def cut(self, images: Tensor) -> Tensor:
        """Return patches row by row: ``[n, 1, 24, 24]`` to ``[n, 64, 9]``."""
        return torch.nn.functional.unfold(images, SIDE, stride=SIDE).mT

    def tokens(self, images: Tensor) -> Tensor:
        """Return the nearest code of each patch, int64 ``[n, 64]``."""
        return torch.cdist(self.cut(images), self.codes[None]).argmin(-1)

    def images(self, tokens: Tensor) -> Tensor:
        """Return the scenes of codes, ``[n, 1, 24, 24]``."""
        return torch.nn.functional.fold(self.codes[tokens].mT, scenes.CANVAS, SIDE, stride=SIDE)


class Reader:
    """A reader of cells: logistic regression trained on real digits, and the darkest ink.

    A digit is cut out with the ink that is there, put in the middle of 12x12 pixels, and made as dark as it can be.
    """

    def __init__(self, digits: scenes.Digits):
        from sklearn.linear_model import LogisticRegression  # noqa: PLC0415  as in Patches.of

        middle = np.stack([self._middle(own) for own in digits.images])
        self.classifier = LogisticRegression(max_iter=2000).fit(middle, digits.labels)

    @staticmethod
    def _middle(cell: np.ndarray) -> np.ndarray:
        """Return the ink in the middle: ``[144]``."""
        rows, columns = (np.flatnonzero((cell > 0.2 * cell.max()).any(axis)) for axis in (1, 0))
        own = cell[rows[0] : rows[-1] + 1, columns[0] : columns[-1] + 1] / cell.max()
        top, left = ((scenes.CELL - size) // 2 for size in own.shape)
        room = np.zeros((scenes.CELL, scenes.CELL))
        room[top : top + own.shape[0], left : left + own.shape[1]] = own
        return room.ravel()

    def things(self, images: Tensor) -> np.ndarray:
        """Return the objects that are read in each cell, in the format of `scenes.Scenes.things`."""
        size = scenes.CELL
        cells = images[:, 0].unfold(1, size, size).unfold(2, size, size).reshape(-1, size, size).numpy()
        there = cells.max((1, 2)) > scenes.LIGHT / 2
        found = np.full(len(cells), scenes.NOTHING)
        if there.any():
            labels = self.classifier.predict(np.stack([self._middle(own) for own in cells[there]]))
            dark = cells[there].max((1, 2)) > (1 + scenes.LIGHT) / 2
            found[there] = labels + 10 * dark
        return found.reshape(-1, scenes.CELLS)

    def shares(self, images: Tensor, things: Tensor) -> dict[str, Any]:
        """Return the share of digits that are read right, and of cells with the right ink, also formatted."""
        expected, predicted = things.numpy(), self.things(images)
        read = float((predicted == expected)[expected != scenes.NOTHING].mean())
        inked = float((predicted // 10 == expected // 10).mean())
        return {"read": read, "inked": inked, "shown read": f"{read:.1%}", "shown inked": f"{inked:.1%}"}


class Markov:
    """A Markov model of patches from their left and upper neighbours and positions, with fallback for rare contexts.

    Each count is mixed with the one that knows less, as if that had been seen ``doubt`` times (Dirichlet).
    """

    def __init__(self, tokens: np.ndarray, side: int, codes: int, doubt: float = 4.0):
        self.side, self.codes, self.doubt = side, codes, doubt
        self.counts: list[dict[Any, collections.Counter[int]]] = [
            collections.defaultdict(collections.Counter) for _ in range(4)
        ]
        for row in tokens.tolist():
            for place, own in enumerate(row):
                for counts, key in zip(self.counts, self._keys(row, place), strict=True):
                    counts[key][own] += 1

    def _keys(self, row: list[int], place: int) -> list[Any]:
        """Return the contexts of a patch: none; the left neighbour; also the upper one; also the position."""
        left = row[place - 1] if place % self.side else -1
        above = row[place - self.side] if place >= self.side else -1
        beyond = row[place - self.side + 1] if place >= self.side and (place + 1) % self.side else -1
        return [(), left, (left, above), (left, above, beyond)]

    def probabilities(self, row: list[int], place: int) -> np.ndarray:
        """Return the probability of each patch after those before it."""
        found = np.full(self.codes, 1 / self.codes)
        for counts, key in zip(self.counts, self._keys(row, place), strict=True):
            own = counts.get(key, {})
            seen = np.zeros(self.codes)
            seen[list(own)] = list(own.values())
            found = (seen + self.doubt * found) / (seen.sum() + self.doubt)
        return found

    def bits(self, tokens: np.ndarray) -> float:
        """Return bits per patch of scenes."""
        likely = [self.probabilities(row, i)[row[i]] for row in tokens.tolist() for i in range(len(row))]
        return float(-np.log2(likely).mean())

    def paint(self, count: int) -> Tensor:
        """Draw scenes patch by patch: tokens ``[count, patches]``."""
        rng = np.random.default_rng(0)
        made = np.zeros((count, self.side**2), np.int64)
        for row in made:
            for place in range(self.side**2):
                row[place] = rng.choice(self.codes, p=self.probabilities(row.tolist(), place))
        return torch.from_numpy(made)
