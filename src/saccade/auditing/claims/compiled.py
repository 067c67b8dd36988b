"""The claim that a compiled model gives the same rows as an eager run."""

from __future__ import annotations

import torch

from saccade.auditing.claims.compared import compared
from saccade.auditing.claims.model_measurements import ModelMeasurements
from saccade.auditing.equivalence_pairs import RunPair
from saccade.auditing.finding import ClaimResult


def compiled(measured: ModelMeasurements) -> list[ClaimResult]:
    """Check that the model traced by torch.compile gives the same rows as an eager run, without generating kernels.

    Cost: a few seconds for tracing.
    """
    ids = measured.ids
    pairs: dict[str, RunPair] = {"compiled": lambda full_run: (full_run.runner.compiled().whole(ids), full_run.whole)}
    try:
        return compared(measured, pairs)
    finally:
        torch.compiler.reset()
