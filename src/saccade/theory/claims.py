"""All claims, topic by topic."""

from __future__ import annotations

from saccade.errors import type_error, value_error
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

CLAIMS: tuple[Claim, ...] = (
    *scaling.CLAIMS,
    *softmax.CLAIMS,
    *gradients.CLAIMS,
    *products.CLAIMS,
    *averages.CLAIMS,
    *symmetry.CLAIMS,
    *rank.CLAIMS,
    *spectrum.CLAIMS,
    *mixture.CLAIMS,
    *information.CLAIMS,
    *relatives.CLAIMS,
    *heads.CLAIMS,
    *paths.CLAIMS,
    *complexity.CLAIMS,
    *graphs.CLAIMS,
    *features.CLAIMS,
    *masking.CLAIMS,
)
"""Every claim, in the order of the documents."""


def find(name: str) -> Claim:
    """The claim of this name.

    Raises:
        TypeError: a name that is no text.
        ValueError: no claim has it.

    Example:
        >>> print(find("attention-has-low-rank").verdict)
        refuted
    """
    if not isinstance(name, str):
        raise type_error("theory.find", "name", "be a string", type(name).__name__)
    for claim in CLAIMS:
        if claim.name == name:
            return claim
    near = [claim.name for claim in CLAIMS if name in claim.name or claim.topic == name]
    hint = f"did you mean {', '.join(near)}?" if near else "theory.CLAIMS has them all"
    raise value_error("theory.find", "name", "be that of a claim", repr(name), hint=hint)
