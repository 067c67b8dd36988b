"""The claim that windows have their declared width, measured in each module and when decoding with a cache."""

from __future__ import annotations

from saccade.auditing.claims.compared import compared
from saccade.auditing.claims.model_measurements import Asked, result
from saccade.auditing.equivalence_pairs import RunPair, one_by_one, steps_at_window
from saccade.auditing.finding import ClaimResult, CounterExample
from saccade.auditing.runner import Unanswered


def window(asked: Asked) -> list[ClaimResult]:
    """Check the width of each window, and that decoding with a cache sees the same keys at the window's edge.

    Widths do not include the row's own key. The ``sliding_window=W`` of transformers includes it and is a width of
    W - 1.
    """
    return [_width(asked), *_decoded(asked)]


def _width(asked: Asked) -> ClaimResult:
    """Compare the measured width of each module's window with the width that its rule declares."""
    composed, told, found = asked.composed, list[str](), list[CounterExample]()
    length = asked.subject.shape[1]
    for name in composed.ruled:
        for one in asked.layered.seen(name):
            item, place = one.row
            own = composed.required(name, place)[item].nonzero().flatten()
            if place <= length // 2 or not len(own) or not (width := place - int(own.min())) or width >= place:
                continue  # the far edge of its window is not within this text
            seen = place - int(one.seen.nonzero().min())
            if not any(line.startswith(f"{name}:") for line in told):
                told.append(f"{name}: {seen} keys besides self, {seen + 1} with it")
            if seen != width and not any(other.module == name for other in found):
                kind = "leak" if seen > width else "blind"
                key = (item, place - max(seen, width))
                found.append(CounterExample(kind, one.row, key, float(abs(seen - width)), name, "replay"))  # type: ignore[arg-type]
    if not told:
        why = f"no declared window ends within {length} tokens"
        return ClaimResult("window", "not answered", why=why)
    return result("window", found[0] if found else None, _short(told))


def _short(told: list[str]) -> str:
    """Summarize the measured widths, grouping modules with equal widths."""
    widths: dict[str, list[str]] = {}
    for line in told:
        name, _, width = line.partition(": ")
        widths.setdefault(width, []).append(name)
    return "; ".join(f"{width} in {names[0]}" + _more(len(names) - 1) for width, names in widths.items())


def _more(count: int) -> str:
    return f" and {count} more" if count else ""


def _decoded(asked: Asked) -> list[ClaimResult]:
    try:
        runner, ids = asked.runner(), asked.ids
    except Unanswered:
        return []
    if runner.window is None:
        return []
    pairs: dict[str, RunPair] = dict([*steps_at_window(ids, runner.window), one_by_one(ids)])
    return compared(asked, pairs)
