"""Markov chains with interpolated orders: rare contexts fall back to shorter ones."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from chorales import BEATS, HIGH, LOW, SYMBOLS, VOICES, Chorale, Text, as_text


class Markov:
    r"""Conditional probabilities of symbols after contexts, from counts.

    .. math:: p_k(x) = \frac{n_k(x) + s\, u_k\, p_{k-1}(x)}{n_k + s\, u_k}

    where the context, cut to k columns, was seen :math:`n_k` times, before x :math:`n_k(x)` times, and before
    :math:`u_k` different symbols. With s = 1 this is Witten and Bell's mixture (1991); s is for the caller to choose.

    Args:
        contexts: ints from 0 to below ``base``, ``[n, columns]``, the most important column first.
        symbols: the symbol after each context: ints below ``num_symbols``, ``[n]``.
        base: number of values of a column.
        num_symbols: number of symbols; all have the same probability without counts.
        first: columns that every context has.

    Cost: O(n log n) for each column.
    """

    def __init__(self, contexts: np.ndarray, symbols: np.ndarray, base: int, num_symbols: int, first: int = 0):
        assert base ** contexts.shape[1] * num_symbols < 2**63, "a context and a symbol are one int64"
        self.base, self.num_symbols, self.first = base, num_symbols, first
        self.tables = [self._count(self._key(contexts, order), symbols) for order in self._orders(contexts)]

    def probabilities(self, contexts: np.ndarray, symbols: np.ndarray, strength: float) -> np.ndarray:
        """Return the probability of each symbol after its context, at every order: ``[orders, n]``."""
        found, likely = [], np.full(len(symbols), 1 / self.num_symbols)
        for order, (pairs, pair_counts, keys, key_counts, kinds) in zip(
            self._orders(contexts), self.tables, strict=True
        ):
            key = self._key(contexts, order)
            count, total = _of(pairs, pair_counts, key * self.num_symbols + symbols), _of(keys, key_counts, key)
            mixed = strength * _of(keys, kinds, key)
            likely = np.where(total > 0, (count + mixed * likely) / np.maximum(total + mixed, 1e-300), likely)
            found.append(likely)
        return np.array(found)

    def _orders(self, contexts: np.ndarray) -> range:
        return range(self.first, contexts.shape[1] + 1)

    def _key(self, contexts: np.ndarray, order: int) -> np.ndarray:
        key = np.zeros(len(contexts), np.int64)
        for column in contexts[:, :order].T:
            key = key * self.base + column
        return key

    def _count(self, key: np.ndarray, symbols: np.ndarray) -> tuple[np.ndarray, ...]:
        pairs, pair_counts = np.unique(key * self.num_symbols + symbols, return_counts=True)
        keys, key_counts = np.unique(key, return_counts=True)
        _, kinds = np.unique(pairs // self.num_symbols, return_counts=True)
        return pairs, pair_counts, keys, key_counts, kinds


def _of(sorted_keys: np.ndarray, values: np.ndarray, wanted: np.ndarray) -> np.ndarray:
    """Return the values of keys, 0 for missing ones."""
    at = np.searchsorted(sorted_keys, wanted).clip(max=len(sorted_keys) - 1)
    return np.where(sorted_keys[at] == wanted, values[at], 0)


# --- of chorales -----------------------------------------------------------------------------------------------------

# Earlier symbols in a context, from the nearest; the fourth belongs to the voice itself.
CONTEXTS = {"by nearness": (1, 2, 3, 4, 5, 6, 7), "the voice itself first": (4, 1, 2, 3, 5, 8, 6)}
STRENGTHS = (0.5, 1, 2, 4, 8, 16, 32)


def contexts(text: Text, back: Sequence[int]) -> np.ndarray:
    """Return the voice, the position in the bar, and earlier symbols, as contexts: ``[n, 1 + back]``."""
    last = np.r_[[0] * max(back), text.known[:, 0].numpy()]
    columns = [last[max(back) + 1 - own : len(last) + 1 - own] for own in back]
    return np.stack([text.known[:, 2].numpy(), *columns], 1)


def best(parts: dict[str, list[Chorale]], keys: Sequence[int], back: Sequence[int]) -> tuple[int, np.ndarray]:
    """Return the order with the best likelihood on the validation part, and bits of all test symbols."""
    learned = [as_text(chorale, key) for chorale in parts["train"] for key in keys]
    chain = Markov(
        np.concatenate([contexts(text, back) for text in learned]),
        np.concatenate([text.symbols.numpy() for text in learned]),
        base=max(BEATS * len(VOICES), HIGH - LOW + 2), num_symbols=SYMBOLS, first=1,
    )  # fmt: skip

    def taken(part: str, strength: float) -> np.ndarray:
        texts = list(map(as_text, parts[part]))
        known = np.concatenate([contexts(text, back) for text in texts])
        return -np.log2(chain.probabilities(known, np.concatenate([text.symbols.numpy() for text in texts]), strength))

    total = np.array([taken("validation", strength).sum(1) for strength in STRENGTHS])
    strength, order = np.unravel_index(total.argmin(), total.shape)
    return int(order), taken("test", STRENGTHS[strength])[order]
