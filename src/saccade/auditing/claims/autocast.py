"""The claims that, under autocast to bfloat16, rows depend on no forbidden token and runs differ only by rounding."""

from __future__ import annotations

from collections.abc import Iterator

import torch

from saccade.auditing.claims.compared import claim_of
from saccade.auditing.claims.model_measurements import ModelMeasurements, first_of, result
from saccade.auditing.equivalence import pairs_under_autocast, weakness
from saccade.auditing.equivalence_pairs import autocast_pairs
from saccade.auditing.finding import ClaimResult, CounterExample
from saccade.auditing.leak_location import first_module
from saccade.auditing.probe_sets import row_sets, separating_sets
from saccade.auditing.rounding_noise import FACTOR, autocast_noise, row_differences
from saccade.auditing.runner import Unanswered
from saccade.support.language import Message

_SETS = 6


def autocast(measured: ModelMeasurements) -> Iterator[ClaimResult]:
    """Check a model under autocast: which tokens its rows depend on, their values, and equivalent ways of running it.

    The allowed difference is derived from the rounding of bfloat16: four times the effect, on this model under
    autocast, of one rounding in the result of every module and in every weight matrix. Ways of running the model that
    already differ without autocast are not compared.
    """
    yield _reach(measured)
    yield _as_without(measured)
    yield from _pairs(measured)


def _reach(measured: ModelMeasurements) -> ClaimResult:
    """Check that forbidden tokens change no row under autocast to bfloat16, and that all rows are finite.

    Two runs on changed texts are compared bit by bit, so that rounding to bfloat16 hides no leak.
    """
    name, subject = "under autocast", measured.subject
    reach = measured.composed.reach
    other = torch.randn(subject.vectors.shape, generator=torch.Generator().manual_seed(measured.seed + 1))
    vectors = subject.vectors + other.to(subject.vectors) * subject.vectors.std()
    sets = [
        *separating_sets(reach),
        *(~one.sources for one in row_sets(reach, measured.checked_rows, _SETS, measured.seed)),
    ]
    with torch.autocast(subject.vectors.device.type, torch.bfloat16):
        plain = subject.run()
        floor = 4 * float(row_differences(subject.run(), plain).max())
        if not bool(plain.isfinite().all()):
            row = first_of(~plain.isfinite().flatten(2).all(-1))
            return result(name, CounterExample("differs", row, None, float("inf"), "", "autocast", subject.passes))
        for keys in sets:
            clean = measured.checked_rows & ~reach.through(keys)
            if not bool(clean.any()) or not bool(keys.any()):
                continue
            changed = torch.where(keys.to(vectors.device)[..., None], vectors, subject.vectors)
            moved = row_differences(subject.run(changed), plain).cpu().masked_fill(~clean, 0)
            if float(moved.max()) > floor:
                row, key = first_of(moved > floor), first_of(keys)
                module = first_module(subject, reach, key, changed)
                size = float(moved.max())
                return result(name, CounterExample("leak", row, key, size, module, "autocast", subject.passes))
    return result(name, None)


def _as_without(measured: ModelMeasurements) -> ClaimResult:
    """Check that rows are equal with and without autocast, up to the rounding of bfloat16."""
    subject = measured.subject
    name = Message("autocast = {dtype}", dtype=str(subject.rows.dtype).removeprefix("torch."))
    if subject.module is None:
        return ClaimResult(name, "not answered", why="rounding was not measured: the model is a function")
    with torch.autocast(subject.vectors.device.type, torch.bfloat16):
        rows = subject.run()
        moved = row_differences(rows, subject.rows).cpu().masked_fill(~measured.checked_rows, 0)
        size = float(moved.max())
        noise = autocast_noise(subject.module, subject.run, rows, size, measured.seed)
    allowed = FACTOR * noise
    if size <= allowed:
        return ClaimResult(name, "held", size, allowed, why=weakness(noise))
    row = first_of(moved > allowed)
    return result(name, CounterExample("differs", row, None, size, "", "autocast", subject.passes), allowed=allowed)


def _pairs(measured: ModelMeasurements) -> list[ClaimResult]:
    """Check equivalent ways of running the model under autocast; claims without an answer are left out."""
    try:
        runner, ids, texts = measured.runner(), measured.ids, measured.texts
    except Unanswered:
        return []
    found = pairs_under_autocast(runner, ids, list(autocast_pairs(ids, texts)), seed=measured.seed)
    return [claim_of(one, measured.subject.passes) for one in found if one.verdict != "not answered"]
