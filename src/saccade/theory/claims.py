"""List all claims by topic, and format claims as Markdown for the documentation."""

from __future__ import annotations

from collections.abc import Sequence

from saccade.support.errors import value_error
from saccade.support.validation import check_type
from saccade.theory import (
    averages,
    bottleneck,
    capacity,
    cause_of_sinks,
    clustering,
    complexity,
    cost_of_steps,
    decoding,
    features,
    gradients,
    graphs,
    heads,
    induction,
    information,
    layer_definitions,
    linear,
    lipschitz,
    masking,
    matrix_products,
    memory_traffic,
    mixture,
    paths,
    polynomials,
    positions,
    rank,
    related_methods,
    scaling,
    sharpness,
    similarity,
    softmax,
    spectrum,
    symmetry,
    trained_layers,
    trained_models,
    universality,
)
from saccade.theory.claim import Claim, Verdict

_TOPICS = (
    *(scaling, similarity),
    *(softmax, sharpness, gradients, lipschitz),
    *(matrix_products, averages, symmetry, positions, universality, induction),
    *(rank, clustering, bottleneck, spectrum),
    *(mixture, information),
    *(related_methods, linear, heads, layer_definitions),
    *(trained_layers, cause_of_sinks, trained_models),
    *(paths, capacity, complexity, cost_of_steps, memory_traffic, decoding, graphs),
    *(features, polynomials),
    masking,
)

CLAIMS: tuple[Claim, ...] = tuple(x for topic in _TOPICS for x in vars(topic).values() if isinstance(x, Claim))
"""All claims, ordered by topic as in the documentation."""

CONDITION: dict[Verdict, str] = {"holds": "With", "holds if": "If", "refuted": "But"}
"""The word that introduces the conditions of each verdict."""


def find(name: str) -> Claim:
    """Look up a claim by its name.

    Raises:
        TypeError: the name is not a string.
        ValueError: no claim has this name.

    Example:
        >>> print(find("attention-has-low-rank").verdict)
        refuted
    """
    check_type("name", name, str, "be a string")
    for claim in CLAIMS:
        if claim.name == name:
            return claim
    near = [claim.name for claim in CLAIMS if name in claim.name or claim.topic == name]
    hint = f"did you mean {', '.join(near)}?" if near else "theory.CLAIMS lists all claims"
    raise value_error("name", "be the name of a claim", repr(name), hint=hint)


def table(claims: Sequence[Claim]) -> str:
    """Format claims as a Markdown table of name, verdict and statement."""
    lines = ["| claim | verdict | statement |", "|---|---|---|"]
    lines += [f"| `{claim.name}` | {claim.verdict} | {claim.statement} |" for claim in claims]
    return "\n".join(lines) + "\n"


def sections(claims: Sequence[Claim]) -> str:
    """Format claims as Markdown sections with statement, formula, conditions and source."""
    return "\n".join(_section(claim) for claim in claims)


def _section(claim: Claim) -> str:
    lines = [f"### `{claim.name}`: {claim.verdict}", "", claim.statement, "", "$$", claim.latex, "$$", ""]
    if claim.conditions:
        lines += [f"*{CONDITION[claim.verdict]}:* {claim.conditions}.", ""]
    return "\n".join([*lines, f"*Source:* {claim.source}.", ""])
