"""Five common mistakes in attention code, and the laws of `saccade.testing` that catch them."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable

import torch
from torch import Tensor

from saccade import testing


@dataclasses.dataclass(frozen=True)
class Mistake:
    """An attention function with one mistake.

    Attributes:
        name: a short name of the mistake.
        what: a sentence that describes the mistake.
        function: ``function(query, key, value, mask)``, mask True = may attend.
        caught_by: the law with the clearest counter-example.
        case: the name of the test case that shows the mistake.
        claims: the function's claims about its memory, if the mistake violates one of them; None otherwise.

    Example:
        >>> from saccade import theory
        >>> mistake = theory.MISTAKES[1]
        >>> mistake.name, mistake.caught_by
        ('missing scale', 'oracle')
        >>> print(mistake.message)
        oracle[full-float64] broken: the output at [0, 2, 1, 4] is 2.159, not 0.949974; error 6.8e-01, allowed 1e-11
    """

    name: str
    what: str
    function: Callable[[Tensor, Tensor, Tensor, Tensor], Tensor]
    caught_by: str
    case: str
    claims: testing.Claims | None = None

    def check(self, function: Callable[..., Tensor] | None = None) -> testing.Report:
        """Run the law that catches this mistake on the case that shows it.

        Args:
            function: an attention function to check instead. A function without the mistake passes.
        """
        law = next(law for law in testing.LAWS if law.name == self.caught_by)
        cases = [case for case in law.cases or testing.CASES if case.name == self.case]
        return testing.check(
            self.function if function is None else function,
            gqa=False,
            cases=cases,
            laws=[dataclasses.replace(law, cases=None if law.cases is None else tuple(cases))],
            dtypes=[torch.float64],
            claims=self.claims,
            seed=0,
        )

    @property
    def message(self) -> str:
        """The counter-example that the law reports for this attention function."""
        return str(self.check().broken[0])


def _wrong_sides(query: Tensor, key: Tensor, value: Tensor, mask: Tensor) -> Tensor:
    scores = key @ query.mT * query.shape[-1] ** -0.5  # [kv_len, q_len]: transposed
    weights = scores.masked_fill(~mask.mT, -1e9).softmax(-2)
    return weights @ value


def _no_scale(query: Tensor, key: Tensor, value: Tensor, mask: Tensor) -> Tensor:
    scores = query @ key.mT
    return scores.masked_fill(~mask, -1e9).softmax(-1) @ value


def _one_mask_for_all(query: Tensor, key: Tensor, value: Tensor, mask: Tensor) -> Tensor:
    scores = query @ key.mT * query.shape[-1] ** -0.5
    return scores.masked_fill(~mask.any(0), -1e9).softmax(-1) @ value


def _wrong_axis(query: Tensor, key: Tensor, value: Tensor, mask: Tensor) -> Tensor:
    scores = query @ key.mT * query.shape[-1] ** -0.5
    return scores.masked_fill(~mask, -1e9).softmax(-2) @ value


def _all_weights(query: Tensor, key: Tensor, value: Tensor, mask: Tensor) -> Tensor:
    scores = query @ key.mT * query.shape[-1] ** -0.5
    return scores.masked_fill(~mask, -1e9).softmax(-1) @ value


MISTAKES = (
    Mistake(
        "mismatched dimensions",
        "keys times queries: weights and values fit only if there are as many queries as keys, and then by accident",
        _wrong_sides,
        "oracle",
        "more-keys",
    ),
    Mistake("missing scale", "scores are not divided by the root of head_dim", _no_scale, "oracle", "full"),
    Mistake(
        "wrong mask",
        "texts of several lengths are padded, and all get the mask of the longest: the others look at padding",
        _one_mask_for_all,
        "polarity",
        "padding",
    ),
    Mistake("wrong axis", "softmax runs over queries instead of keys", _wrong_axis, "ones", "full"),
    Mistake(
        "quadratic memory",
        "all weights are stored, where linear memory was promised",
        _all_weights,
        "cost",
        "full",
        testing.Claims(memory_exponent=1.0),
    ),
)
"""The five mistakes, in the order in which tutorials mention them."""
