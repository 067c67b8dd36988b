"""The claim that windows have their declared width, measured in each module and when decoding with a cache."""

from __future__ import annotations

from saccade.auditing.claims.compared import compared
from saccade.auditing.claims.model_measurements import ModelMeasurements, result
from saccade.auditing.equivalence_pairs import RunPair, one_by_one, steps_at_window
from saccade.auditing.finding import ClaimResult, CounterExample
from saccade.auditing.runner import Unanswered


def window(measured: ModelMeasurements) -> list[ClaimResult]:
    """Check the width of each window, and that decoding with a cache sees the same keys at the window's edge.

    Widths do not include the row's own key. The ``sliding_window=W`` of transformers includes it and is a width of
    W - 1.
    """
    return [_width(measured), *_decoded(measured)]


def _width(measured: ModelMeasurements) -> ClaimResult:
    """Compare the measured width of each module's window with the width that its rule declares."""
    composed, descriptions, found = measured.composed, list[str](), list[CounterExample]()
    length = measured.subject.shape[1]
    for name in composed.ruled:
        for one in measured.layered.measured_rows(name):
            item, position = one.row
            own = composed.required(name, position)[item].nonzero().flatten()
            if position <= length // 2 or not len(own) or not (width := position - int(own.min())) or width >= position:
                continue  # the far edge of its window is not within this text
            seen = position - int(one.seen.nonzero().min())
            if not any(line.startswith(f"{name}:") for line in descriptions):
                descriptions.append(f"{name}: {seen} keys before the query, {seen + 1} including it")
            if seen != width and not any(other.module == name for other in found):
                kind = "leak" if seen > width else "blind"
                key = (item, position - max(seen, width))
                found.append(CounterExample(kind, one.row, key, float(abs(seen - width)), name, "replay"))  # type: ignore[arg-type]
    if not descriptions:
        why = f"no declared window ends within {length} tokens"
        return ClaimResult("window", "not answered", why=why)
    return result("window", found[0] if found else None, _by_width(descriptions))


def _by_width(descriptions: list[str]) -> str:
    """Summarize the measured widths, grouping modules with equal widths."""
    widths: dict[str, list[str]] = {}
    for line in descriptions:
        name, _, width = line.partition(": ")
        widths.setdefault(width, []).append(name)
    return "; ".join(f"{width} in {names[0]}" + _more(len(names) - 1) for width, names in widths.items())


def _more(count: int) -> str:
    return f" and {count} more" if count else ""


def _decoded(measured: ModelMeasurements) -> list[ClaimResult]:
    try:
        runner, ids = measured.runner(), measured.ids
    except Unanswered:
        return []
    if runner.window is None:
        return []
    pairs: dict[str, RunPair] = dict([*steps_at_window(ids, runner.window), one_by_one(ids)])
    return compared(measured, pairs)
