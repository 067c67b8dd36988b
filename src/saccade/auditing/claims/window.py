"""The claim that a window has its width: measured in each module, and the same with a cache."""

from __future__ import annotations

from saccade.auditing.claims.compared import compared
from saccade.auditing.claims.model_measurements import Asked, result
from saccade.auditing.equivalence_pairs import RunPair, one_by_one, steps_at_window
from saccade.auditing.finding import ClaimResult, CounterExample
from saccade.auditing.runner import Unanswered


def window(asked: Asked) -> list[ClaimResult]:
    """Check the width of each window, and that steps through a cache see the same keys at its edge.

    A window counts keys besides the row's own. ``sliding_window=W`` of transformers counts the row's own, too: it is
    W - 1 keys besides.
    """
    return [_width(asked), *_decoded(asked)]


def _width(asked: Asked) -> ClaimResult:
    """Compare how far each module was measured to see with how far its rule reaches."""
    composed, told, found = asked.composed, list[str](), list[CounterExample]()
    length = asked.subject.shape[1]
    for name in composed.ruled:
        for one in asked.layered.seen(name):
            item, place = one.row
            own = composed.required(name, place)[item].nonzero().flatten()
            if place <= length // 2 or not len(own) or not (width := place - int(own.min())) or width >= place:
                continue  # its window is not seen to end
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
    """Return the measured widths, with the modules of one width in one sentence."""
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
