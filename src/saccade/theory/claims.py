"""All claims, topic by topic."""

from __future__ import annotations

from saccade.arguments import instance
from saccade.errors import value_error
from saccade.theory import (
    averages,
    complexity,
    features,
    gradients,
    graphs,
    heads,
    information,
    masking,
    mixture,
    paths,
    products,
    rank,
    relatives,
    scaling,
    softmax,
    spectrum,
    symmetry,
)
from saccade.theory.claim import Claim

__all__ = ["CLAIMS", "find"]

_TOPICS = (
    *(scaling, softmax, gradients, products, averages, symmetry, rank, spectrum, mixture),
    *(information, relatives, heads, paths, complexity, graphs, features, masking),
)

CLAIMS: tuple[Claim, ...] = tuple(one for topic in _TOPICS for one in vars(topic).values() if isinstance(one, Claim))
"""Every claim that a topic states, in the order of the documents."""


def find(name: str) -> Claim:
    """The claim of this name.

    Raises:
        TypeError: a name that is no text.
        ValueError: no claim has it.

    Example:
        >>> print(find("attention-has-low-rank").verdict)
        refuted
    """
    instance("theory.find", "name", name, str, "be a string")
    for claim in CLAIMS:
        if claim.name == name:
            return claim
    near = [claim.name for claim in CLAIMS if name in claim.name or claim.topic == name]
    hint = f"did you mean {', '.join(near)}?" if near else "theory.CLAIMS has them all"
    raise value_error("theory.find", "name", "be that of a claim", repr(name), hint=hint)
