"""The claim that the compiled model gives the rows of the model as it is written."""

from __future__ import annotations

import torch

from saccade.auditing.claims.compared import compared
from saccade.auditing.claims.model_measurements import Asked
from saccade.auditing.equivalence_pairs import RunPair
from saccade.auditing.finding import ClaimResult


def compiled(asked: Asked) -> list[ClaimResult]:
    """Check that the model traced by torch.compile gives the rows of a plain run; kernels are not generated.

    Cost: some seconds, for tracing.
    """
    ids = asked.ids
    pairs: dict[str, RunPair] = {"compiled": lambda own: (own.runner.compiled().whole(ids), own.whole)}
    try:
        return compared(asked, pairs)
    finally:
        torch.compiler.reset()
