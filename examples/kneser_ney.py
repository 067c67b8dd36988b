"""An n-gram with modified Kneser-Ney smoothing: a baseline for language models."""

from __future__ import annotations

import collections
import math
from collections.abc import Iterable, Iterator


class NGram:
    """An interpolated n-gram with modified Kneser-Ney smoothing.

    The probability of a token after its history is its discounted count there, plus what the discounts left times its
    probability after the history that is one token shorter. Shorter histories count in how many contexts a token
    occurs, not how often. Below the shortest, all tokens are alike.

    Reference: Chen and Goodman 1999, "An empirical study of smoothing techniques for language modeling", section 2.8.
    """

    def __init__(self, blocks: Iterable[list[int]], order: int, vocab_size: int, end: int):
        self.order, self.vocab_size, self.end = order, vocab_size, end
        counts: list[dict[tuple[int, ...], collections.Counter[int]]] = [{} for _ in range(order)]
        for history, token in self._pairs(blocks):
            counts[order - 1].setdefault(history, collections.Counter())[token] += 1
        for size in range(order - 2, -1, -1):  # number of contexts, from the longer ones
            for history, found in counts[size + 1].items():
                shorter = counts[size].setdefault(history[1:], collections.Counter())
                for token in found:
                    shorter[token] += 1
        self._counts = counts
        self._discounts = [_discounts(level) for level in counts]

    def nats(self, blocks: Iterable[list[int]]) -> float:
        """Return the total negative log-likelihood of blocks."""
        return -sum(math.log(self.probability(history, token)) for history, token in self._pairs(blocks))

    def probability(self, history: tuple[int, ...], token: int) -> float:
        """Return the probability of ``token`` after the last ``order - 1`` tokens."""
        found = 1 / self.vocab_size
        for size in range(self.order):
            own = self._counts[size].get(history[len(history) - size :])
            if own is None:
                continue  # unseen history: use the shorter one
            discounts = self._discounts[size]
            total = own.total()
            count = own.get(token, 0)
            left = sum(discounts[min(c, 3)] * n for c, n in collections.Counter(own.values()).items())
            found = max(count - discounts[min(count, 3)], 0) / total + left / total * found
        return found

    def _pairs(self, blocks: Iterable[list[int]]) -> Iterator[tuple[tuple[int, ...], int]]:
        for block in blocks:
            padded = [self.end] * (self.order - 1) + block + [self.end]
            for index in range(self.order - 1, len(padded)):
                yield tuple(padded[index - self.order + 1 : index]), padded[index]


def _discounts(level: dict[tuple[int, ...], collections.Counter[int]]) -> tuple[float, float, float, float]:
    """Return the discounts of counts of 0, 1, 2, and 3 or more, from the counts of counts."""
    having = collections.Counter(count for found in level.values() for count in found.values() if count <= 4)
    n1, n2, n3, n4 = (having[count] for count in (1, 2, 3, 4))
    if not (n1 and n2 and n3):
        return (0.0, 0.5, 1.0, 1.5)
    y = n1 / (n1 + 2 * n2)
    estimates = (1 - 2 * y * n2 / n1, 2 - 3 * y * n3 / n2, 3 - 4 * y * n4 / n3)
    # With few counts the estimate may be 0 or everything: use a half then.
    one, two, more = (own if 0 < own < count else count / 2 for count, own in enumerate(estimates, start=1))
    return (0.0, one, two, more)
