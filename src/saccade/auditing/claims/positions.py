"""The claims that shifting all position ids changes nothing, and that the model uses the position ids it receives."""

from __future__ import annotations

from saccade.auditing.claims.compared import compared
from saccade.auditing.claims.model_measurements import ModelMeasurements, result
from saccade.auditing.equivalence_pairs import RunPair
from saccade.auditing.finding import ClaimResult, CounterExample
from saccade.auditing.rounding_noise import row_differences
from saccade.auditing.runner import Unanswered
from saccade.support.language import Message

_SHIFT, _STRETCH = 13, 3


def positions(measured: ModelMeasurements) -> list[ClaimResult]:
    """Check that shifting all positions changes nothing if positions are relative, and that the model uses positions.

    The model uses positions if multiplying them by 3 changes the outputs. In models with several position axes, equal
    positions on all axes must also give the same outputs as no explicit positions.
    """
    ids = measured.ids
    pairs: dict[str, RunPair] = {
        "positions shifted": lambda full_run: (full_run.runner.shifted(ids, _SHIFT), full_run.whole),
        "positions in several axes": lambda full_run: (full_run.runner.on_axes(ids), full_run.whole),
    }
    found = compared(measured, pairs, optional=("positions in several axes",))
    return [*found, _used(measured, None, "positions are used"), *_each_axis(measured)]


def _each_axis(measured: ModelMeasurements) -> list[ClaimResult]:
    try:
        axes = getattr(measured.runner(), "_axes", 0)
    except Unanswered:
        return []
    return [_used(measured, axis, Message("positions are used: axis {axis}", axis=axis)) for axis in range(axes)]


def _used(measured: ModelMeasurements, axis: int | None, name: str) -> ClaimResult:
    """Check that multiplying all positions by 3 changes the outputs of a model that has positions."""
    runner = measured.runner()
    try:
        moved = row_differences(runner.stretched(measured.ids, _STRETCH, axis), runner.whole(measured.ids))
    except Unanswered as answer:
        return ClaimResult(name, "not answered", why=answer.args[0])
    if bool((moved > 0).any()):
        return result(name, None)
    if not getattr(runner, "has_positions", True):
        return ClaimResult(name, "not answered", why="no position module was found")
    row = (0, measured.subject.shape[1] - 1)
    why = "the model takes positions, but no output depends on them"
    found = CounterExample(
        "blind", row, row, 0.0, "", "change", measured.subject.passes, ("output", "the position of token")
    )
    return result(name, found, why)
