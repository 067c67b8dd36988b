"""Baselines for properties of molecules: ridge regression and boosted trees on fingerprints and path lengths."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Sequence

import numpy as np
from torch import Tensor

import molecules
from molecules import TARGETS, Molecule

ALPHAS = (10.0, 30.0, 100.0, 300.0, 1000.0)
MOST_TREES = 300

Fit = Callable[[np.ndarray, np.ndarray], Iterator[Callable[[np.ndarray], np.ndarray]]]


def targets(found: Sequence[Molecule]) -> np.ndarray:
    """Return ``[molecules, targets]``."""
    return np.array([[one.targets[name] for name in TARGETS] for one in found])


def hashed(found: Sequence[Molecule], kind: str, columns: int) -> np.ndarray:
    """Return hashed counts of fragments or pairs in each molecule, and the number of atoms."""
    counts = np.zeros((len(found), columns + 1), np.float32)
    for row, one in zip(counts, found, strict=True):
        for number, count in getattr(one, kind).items():
            # Hash first: the last digits of a pair's number depend on one of its atoms only.
            row[(int(number) * 0x9E3779B97F4A7C15 % 2**64 >> 32) % columns] += count
        row[-1] = len(one.atoms)
    return counts


def path_counts(graphs: Sequence[tuple[Tensor, Tensor, Tensor]], reach: int) -> np.ndarray:
    """Return the numbers of atoms, bonds and rings, of pairs by distance, and of atoms by kind."""
    rows = []
    for atoms, bonds, apart in graphs:
        elements, _, neighbours, _ = atoms.T
        sizes = len(atoms), int((bonds > 0).sum()) // 2
        counted = (
            (apart, reach + 2),
            (bonds, len(molecules.BONDS)),
            (elements, len(molecules.ELEMENTS)),
            (neighbours, molecules.MOST_NEIGHBOURS + 1),
        )
        kinds = [np.bincount(of.numpy().ravel(), minlength=count) for of, count in counted]
        rows.append(np.concatenate([[*sizes, sizes[1] - sizes[0] + 1], *kinds]))
    return np.array(rows, np.float32)


def ridge(x: np.ndarray, y: np.ndarray) -> Iterator[Callable[[np.ndarray], np.ndarray]]:
    """Fit ridge regression for each strength of its penalty."""
    from sklearn.linear_model import Ridge  # noqa: PLC0415  a second of import that --help need not wait for

    for alpha in ALPHAS:
        yield Ridge(alpha=alpha).fit(x, y).predict


def trees(x: np.ndarray, y: np.ndarray) -> Iterator[Callable[[np.ndarray], np.ndarray]]:
    """Fit boosted trees; yield a predictor after every 25 of them."""
    from sklearn.ensemble import HistGradientBoostingRegressor  # noqa: PLC0415  as in ridge

    # The second part chooses the number of trees, instead of a tenth of the first for early stopping.
    fitted = HistGradientBoostingRegressor(max_iter=MOST_TREES, early_stopping=False, random_state=0).fit(x, y)
    for count in range(25, MOST_TREES + 1, 25):
        yield lambda asked, count=count: next(itertools.islice(fitted.staged_predict(asked), count - 1, None))


def best(fit: Fit, x: Sequence[np.ndarray], y: Sequence[np.ndarray]) -> np.ndarray:
    """Return predictions of the last part, with settings chosen for each target on the second part."""
    said = []
    for own in range(len(TARGETS)):
        methods = fit(x[0], y[0][:, own])
        chosen = min(methods, key=lambda says: float(((says(x[1]) - y[1][:, own]) ** 2).mean()))
        said.append(chosen(x[2]))
    return np.stack(said, 1)


def all_of(
    parts: Sequence[Sequence[Molecule]],
    graphs: Sequence[Sequence[tuple[Tensor, Tensor, Tensor]]],
    wanted: Sequence[np.ndarray],
    reach: int,
) -> dict[str, np.ndarray]:
    """Return the predictions of each method, ``[molecules, targets]``; settings are chosen on the second part."""
    fragments, pairs = ([hashed(part, kind, 2048) for part in parts] for kind in ("fragments", "pairs"))
    # Trees would take minutes with that many columns.
    fewer = [hashed(part, "fragments", 512) for part in parts]
    return {
        "boosted trees, counts of path lengths": best(trees, [path_counts(own, reach) for own in graphs], wanted),
        "boosted trees, Morgan fingerprint": best(trees, fewer, wanted),
        "ridge, Morgan fingerprint": best(ridge, fragments, wanted),
        "ridge, pairs of atoms at a distance": best(ridge, pairs, wanted),
        "the mean": np.tile(wanted[0].mean(0), (len(wanted[2]), 1)),
    }
