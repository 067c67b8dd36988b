"""The class `Budget`: the cost of an audit with a given number of tests, and the probability that it misses a fault."""

from __future__ import annotations

import math
from typing import NamedTuple

from saccade.auditing.probe_sets import GRADIENT_SETS, LONG
from saccade.support.language import translated


class Budget(NamedTuple):
    """The cost of an audit, and the probability that it misses a fault.

    Args:
        tests: number of sets of rows to test.
        length: number of tokens of the input.

    Example:
        >>> round(Budget(tests=12, length=48).missed(1 / 48), 2)
        0.78
    """

    tests: int
    length: int

    @property
    def forward(self) -> int:
        """Number of forward passes if no claim is broken and the input is a single document."""
        return self.tests + 10

    @property
    def backward(self) -> int:
        """Number of backward passes of the end-to-end checks."""
        return 2 * (self.tests if self.length <= LONG else min(self.tests, GRADIENT_SETS))

    def missed(self, share: float) -> float:
        """Return the probability of missing a fault that shows in a fraction ``share`` of all rows."""
        return (1 - share) ** self.tests

    def __str__(self) -> str:
        cost = "cost: about {forward} forward passes and {backward} backward passes"
        if self.length > LONG:
            cost = (
                "cost: about {forward} forward passes and {backward} backward passes (for only {sets} sets, from "
                "{start} tokens on)"
            )
        lines = (
            "{tests} sets of rows of {length} tokens",
            cost,
            "a fault in {surely:.0%} of the rows or more is missed in at most 1 of 20 audits",
            "a fault in one row of {length} is missed in {one:.0%} of audits, unless it shows in a single module, of "
            "which {rows} rows are tested",
            "to miss it in at most 1 of 20 audits, use --tests {enough}",
            "never tested: what a model computes from token ids, rows of padding, and claims that were not requested",
            "always tested: every pair of documents or of batch items",
        )
        values = {
            "tests": self.tests,
            "length": self.length,
            "forward": self.forward,
            "backward": self.backward,
            "sets": GRADIENT_SETS,
            "start": LONG + 1,
            "surely": 1 - 0.05 ** (1 / self.tests),
            "one": self.missed(1 / self.length),
            "rows": min(11, self.length),
            "enough": math.ceil(3 * self.length),
        }
        return "\n".join(translated(line, **values) for line in lines)

    def __repr__(self) -> str:
        return str(self)
