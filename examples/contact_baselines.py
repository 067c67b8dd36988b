"""How contacts are read from an alignment without learning: mutual information, and an inverse covariance (DCA)."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np
import torch
from torch import Tensor

from planted_folds import APART, LETTERS, Families


def weights(letters: Tensor, alike: float = 0.8) -> Tensor:
    """How much each of ``[sequences, residues]`` counts: one over how many agree with it in most of their residues."""
    same = (letters[:, None] == letters).double().mean(-1)
    return 1 / (same >= alike).sum(1).double()


def without_background(scores: Tensor) -> Tensor:
    """Average product correction: less what a column shares with all others (Dunn et al. 2008)."""
    n = len(scores)
    own = scores.masked_fill(torch.eye(n, dtype=torch.bool), 0)
    columns = own.sum(1) / (n - 1)
    return own - columns[:, None] * columns / columns.mean()


def frequencies(letters: Tensor, pseudocount: float) -> tuple[Tensor, Tensor]:
    """Of letters ``[residues, letters]``, and of pairs of them ``[residues, letters, residues, letters]``.

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
    """How much each column says of each other one, ``[residues, residues]``, corrected."""
    single, pair = frequencies(letters, pseudocount)
    independent = single[:, :, None, None] * single
    return without_background(torch.where(pair > 0, pair * torch.log(pair / independent), 0.0).sum((1, 3)))


def couplings(letters: Tensor, pseudocount: float, ridge: float = 0.0) -> Tensor:
    """Of a Potts model in the mean field, ``[residues, letters, residues, letters]``: an inverse covariance.

    Either a pseudocount or a ridge makes it one that has an inverse.

    Reference: Morcos et al. 2011, arXiv:1110.5223.
    """
    single, pair = frequencies(letters, pseudocount)
    covariance = pair - single[:, :, None, None] * single
    # With a pseudocount alone the last letter, which follows from the others, must be left out.
    n, q = len(single), LETTERS - (ridge == 0)
    matrix = covariance[:, :q, :, :q].reshape(n * q, n * q) + ridge * torch.eye(n * q, dtype=torch.float64)
    found = torch.zeros_like(covariance)
    found[:, :q, :, :q] = -torch.linalg.inv(matrix).reshape(n, q, n, q)
    # Where the letters of either column are 0 on average, so that none is the one that others are compared with.
    found = found - found.mean(1, keepdim=True)
    return found - found.mean(3, keepdim=True)


def direct(letters: Tensor, pseudocount: float, ridge: float = 0.0) -> Tensor:
    """How strong the couplings of two residues are, corrected, ``[residues, residues]``: direct coupling analysis.

    Reference: Ekeberg et al. 2013, arXiv:1211.1281, for their size.
    """
    return without_background(couplings(letters, pseudocount, ridge).square().sum((1, 3)).sqrt())


def precision(scores: Tensor, touches: Tensor, count: int, apart: int) -> float:
    """The share of contacts among the pairs of highest scores that are at least so far apart along the chain."""
    i, j = torch.triu_indices(len(scores), len(scores), apart)
    best = scores[i, j].topk(count).indices
    return float(touches[i, j][best].double().mean())


def separations(touches: Tensor) -> Tensor:
    """How often residues touch that are so far apart along the chain: the same for every family."""
    n = touches.shape[-1]
    apart = (torch.arange(n)[:, None] - torch.arange(n)).abs()
    often = [float(touches[:, apart == distance].double().mean()) for distance in range(n)]
    return torch.tensor(often)[apart]


def mean_precision(maps: Sequence[Tensor], touches: Tensor, count: int) -> float:
    """Of `precision`, over families."""
    return float(np.mean([precision(own, true, count, APART) for own, true in zip(maps, touches, strict=True)]))


PSEUDOCOUNTS, RIDGES = (0.1, 0.3, 0.5, 0.7, 0.9), (0.03, 0.1, 0.3, 1.0, 3.0)
READERS: dict[str, tuple[Callable[[Tensor, float], Tensor], Sequence[float]]] = {
    "mutual information, corrected": (mutual_information, PSEUDOCOUNTS),
    "direct couplings, mean field": (direct, PSEUDOCOUNTS),
    "direct couplings, ridge": (lambda letters, ridge: direct(letters, 0.0, ridge), RIDGES),
}


def all_of(train: Families, chosen_by: Families, test: Families) -> dict[str, list[Tensor]]:
    """The maps of each for every test family; the strength of a pseudocount or a ridge is chosen on the second part."""
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
    """Maps of a regression that has seen the first families: what no pair's own columns tell, it cannot know."""
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
