"""Contacts from an alignment without learning: mutual information and an inverse covariance (DCA)."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np
import torch
from torch import Tensor

from planted_folds import APART, LETTERS, Families


def weights(letters: Tensor, alike: float = 0.8) -> Tensor:
    """Return the weight of each of ``[sequences, residues]``: one over the number of similar sequences."""
    same = (letters[:, None] == letters).double().mean(-1)
    return 1 / (same >= alike).sum(1).double()


def without_background(scores: Tensor) -> Tensor:
    """Apply the average product correction: subtract what a column shares with all others (Dunn et al. 2008)."""
    n = len(scores)
    own = scores.masked_fill(torch.eye(n, dtype=torch.bool), 0)
    columns = own.sum(1) / (n - 1)
    return own - columns[:, None] * columns / columns.mean()


def frequencies(letters: Tensor, pseudocount: float) -> tuple[Tensor, Tensor]:
    """Return frequencies of letters ``[residues, letters]`` and of pairs ``[residues, letters, residues, letters]``.

    The pseudocount is the share of a family in which all letters are as frequent, and independent.
    """
    weight = weights(letters)
    hot = torch.nn.functional.one_hot(letters, LETTERS).double()
    weight, p = weight / weight.sum(), pseudocount
    single = (1 - p) * torch.einsum("m,mia->ia", weight, hot) + p / LETTERS
    pair = (1 - p) * torch.einsum("m,mia,mjb->iajb", weight, hot, hot) + p / LETTERS**2
    for i in range(len(single)):
        pair[i, :, i] = torch.diag(single[i])
    return single, pair


def mutual_information(letters: Tensor, pseudocount: float) -> Tensor:
    """Return the corrected mutual information of columns, ``[residues, residues]``."""
    single, pair = frequencies(letters, pseudocount)
    independent = single[:, :, None, None] * single
    return without_background(torch.where(pair > 0, pair * torch.log(pair / independent), 0.0).sum((1, 3)))


def couplings(letters: Tensor, pseudocount: float, ridge: float = 0.0) -> Tensor:
    """Return the couplings of a mean-field Potts model, ``[residues, letters, residues, letters]``.

    Either a pseudocount or a ridge makes it one that has an inverse.

    Reference: Morcos et al. 2011, arXiv:1110.5223.
    """
    single, pair = frequencies(letters, pseudocount)
    covariance = pair - single[:, :, None, None] * single
    # With a pseudocount only, omit the last letter, which is determined by the others.
    n, q = len(single), LETTERS - (ridge == 0)
    matrix = covariance[:, :q, :, :q].reshape(n * q, n * q) + ridge * torch.eye(n * q, dtype=torch.float64)
    found = torch.zeros_like(covariance)
    found[:, :q, :, :q] = -torch.linalg.inv(matrix).reshape(n, q, n, q)
    # In the zero-sum gauge, so that no letter is a reference for the others.
    found = found - found.mean(1, keepdim=True)
    return found - found.mean(3, keepdim=True)


def direct(letters: Tensor, pseudocount: float, ridge: float = 0.0) -> Tensor:
    """Return the corrected coupling strengths of residues, ``[residues, residues]``: direct coupling analysis.

    Reference: Ekeberg et al. 2013, arXiv:1211.1281, for their size.
    """
    return without_background(couplings(letters, pseudocount, ridge).square().sum((1, 3)).sqrt())


def precision(scores: Tensor, touches: Tensor, count: int, apart: int) -> float:
    """Return the share of contacts among the pairs of highest scores with a minimal distance along the chain."""
    i, j = torch.triu_indices(len(scores), len(scores), apart)
    best = scores[i, j].topk(count).indices
    return float(touches[i, j][best].double().mean())


def separations(touches: Tensor) -> Tensor:
    """Return the frequency of contacts by distance along the chain, the same for every family."""
    n = touches.shape[-1]
    apart = (torch.arange(n)[:, None] - torch.arange(n)).abs()
    often = [float(touches[:, apart == distance].double().mean()) for distance in range(n)]
    return torch.tensor(often)[apart]


def mean_precision(maps: Sequence[Tensor], touches: Tensor, count: int) -> float:
    """Return the mean `precision` over families."""
    return float(np.mean([precision(own, true, count, APART) for own, true in zip(maps, touches, strict=True)]))


PSEUDOCOUNTS, RIDGES = (0.1, 0.3, 0.5, 0.7, 0.9), (0.03, 0.1, 0.3, 1.0, 3.0)
READERS: dict[str, tuple[Callable[[Tensor, float], Tensor], Sequence[float]]] = {
    "mutual information, corrected": (mutual_information, PSEUDOCOUNTS),
    "direct couplings, mean field": (direct, PSEUDOCOUNTS),
    "direct couplings, ridge": (lambda letters, ridge: direct(letters, 0.0, ridge), RIDGES),
}


def all_of(train: Families, chosen_by: Families, test: Families) -> dict[str, list[Tensor]]:
    """Return the maps of each method for every test family; settings are chosen on the validation families."""
    found, strengths, count = {}, {}, test.letters.shape[2] // 2
    for name, (reads, tried) in READERS.items():

        def quality(strength: float, reads: Callable[[Tensor, float], Tensor] = reads) -> float:
            return mean_precision([reads(own, strength) for own in chosen_by.letters], chosen_by.touches, count)

        strengths[name] = max(tried, key=quality)
        found[name] = [reads(own, strengths[name]) for own in test.letters]
    often = separations(train.touches)
    maps = _regression(train, test, often, strengths)
    return {
        "logistic regression on all below, letter by letter": maps,
        **found,
        "distance along the chain": [often] * len(test.letters),
    }


def _regression(train: Families, test: Families, often: Tensor, strengths: dict[str, float]) -> list[Tensor]:
    """Return maps of a regression that is trained on the first families."""
    from sklearn.linear_model import LogisticRegression  # noqa: PLC0415  a second of import that --help need not wait for
    from sklearn.pipeline import make_pipeline  # noqa: PLC0415
    from sklearn.preprocessing import StandardScaler  # noqa: PLC0415

    length = len(often)
    i, j = torch.triu_indices(length, length, APART)

    def features(letters: Tensor) -> np.ndarray:
        single, pair = frequencies(letters, 0.0)
        covariance = (pair - single[:, :, None, None] * single)[i, :, j].flatten(1)
        of_letters = couplings(letters, strengths["direct couplings, mean field"])[i, :, j].flatten(1)
        own = [reads(letters, strengths[name])[i, j, None] for name, (reads, _) in READERS.items()]
        return torch.cat([covariance, of_letters, *own, often[i, j, None]], 1).numpy()

    x = np.concatenate([features(own) for own in train.letters])
    line = make_pipeline(StandardScaler(), LogisticRegression(max_iter=500))
    line.fit(x, train.touches[:, i, j].numpy().ravel())
    maps = []
    for letters in test.letters:
        own = torch.zeros(length, length, dtype=torch.float64)
        own[i, j] = torch.from_numpy(line.decision_function(features(letters)))
        maps.append(own + own.T)
    return maps
