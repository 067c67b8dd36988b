"""Compare equivalent ways of running the audited model, in float64 if the model can run in float64."""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping

from saccade.auditing.claims.model_measurements import ModelMeasurements
from saccade.auditing.equivalence import Pair, compare_run_pairs
from saccade.auditing.equivalence_pairs import RunPair
from saccade.auditing.finding import ClaimResult, CounterExample
from saccade.support.language import Message


def compared(
    measured: ModelMeasurements, pairs: Mapping[str, RunPair], optional: Collection[str] = ()
) -> list[ClaimResult]:
    """Compare each pair of runs, and return one claim for each; optional claims without an answer are left out."""
    found = compare_run_pairs(measured.runner(), measured.ids, list(pairs.items()), seed=measured.seed)
    kept = [one for one in found if one.verdict != "not answered" or one.name not in optional]
    return [claim_of(one, measured.subject.passes) for one in kept]


def claim_of(pair: Pair, passes: int) -> ClaimResult:
    """Convert a comparison of two runs into a claim's result; the first row that differs is the counter-example."""
    answered = pair.verdict != "not answered"
    found = None
    if pair.verdict == "broken" and pair.where is not None:
        found = CounterExample("differs", pair.where, None, pair.difference, "", pair.name, passes)
    kept = Message("the claim holds with saccade's kernel: {remedy}", remedy=pair.remedy) if pair.remedy else ""
    numbers = (pair.difference, pair.allowed) if answered and not math.isnan(pair.difference) else (0.0, 0.0)
    return ClaimResult(pair.name, pair.verdict, *numbers, found, kept if answered else pair.why)
