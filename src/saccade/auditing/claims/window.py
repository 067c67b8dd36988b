"""The claim that windows have their declared width, measured in each module and when decoding with a cache."""

from __future__ import annotations

from collections.abc import Mapping

from saccade.auditing.claims.compared import compared
from saccade.auditing.claims.model_measurements import ModelMeasurements, result
from saccade.auditing.equivalence_pairs import RunPair, one_by_one, steps_at_window
from saccade.auditing.finding import ClaimResult, CounterExample
from saccade.auditing.runner import Unanswered
from saccade.support.language import Message, joined


def window(measured: ModelMeasurements) -> list[ClaimResult]:
    """Check the width of each window, and that decoding with a cache sees the same keys at the window's edge.

    Widths do not include the row's own key. The ``sliding_window=W`` of transformers includes it and is a width of
    W - 1.
    """
    return [_width(measured), *_decoded(measured)]


def _width(measured: ModelMeasurements) -> ClaimResult:
    """Compare the measured width of each module's window with the width that its rule declares."""
    composed, widths, found = measured.composed, dict[str, int](), list[CounterExample]()
    length = measured.subject.shape[1]
    for name in composed.ruled:
        for one in measured.layered.measured_rows(name):
            item, position = one.row
            own = composed.required(name, position)[item].nonzero().flatten()
            if position <= length // 2 or not len(own) or not (width := position - int(own.min())) or width >= position:
                continue  # the far edge of its window is not within this text
            seen = position - int(one.seen.nonzero().min())
            widths.setdefault(name, seen)
            if seen != width and not any(other.module == name for other in found):
                kind = "leak" if seen > width else "blind"
                key = (item, position - max(seen, width))
                found.append(CounterExample(kind, one.row, key, float(abs(seen - width)), name, "replay"))  # type: ignore[arg-type]
    if not widths:
        why = Message("no declared window ends within {length} tokens", length=length)
        return ClaimResult("window", "not answered", why=why)
    return result("window", found[0] if found else None, _by_width(widths))


def _by_width(seen: Mapping[str, int]) -> str:
    """Summarize the measured widths by module, grouping modules with equal widths."""
    widths: dict[int, list[str]] = {}
    for name, width in seen.items():
        widths.setdefault(width, []).append(name)
    return joined(_in_modules(width, names) for width, names in widths.items())


def _in_modules(width: int, names: list[str]) -> str:
    one = "{before} keys before the query, {all} including it in {name}"
    several = "{before} keys before the query, {all} including it in {name} and {more} more"
    return Message(several if len(names) > 1 else one, before=width, all=width + 1, name=names[0], more=len(names) - 1)


def _decoded(measured: ModelMeasurements) -> list[ClaimResult]:
    try:
        runner, ids = measured.runner(), measured.ids
    except Unanswered:
        return []
    if runner.window is None:
        return []
    pairs: dict[str, RunPair] = dict([*steps_at_window(ids, runner.window), one_by_one(ids)])
    return compared(measured, pairs)
