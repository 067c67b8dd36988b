"""The summary: at most 100 lines and 12,000 characters, since a caller may see only the end of the output."""

from __future__ import annotations

from typing import Any

__all__ = ["MOST_LINES", "summary"]

MOST_LINES, WIDTH = 100, 114  # 115 characters with the end of the line
_ENDING = 3  # lines after the steps


def summary(report: dict[str, Any]) -> list[str]:
    """Return the summary of a report as ``report.json`` holds it: failures first, then the main figures, step by step.

    Failures get lines before figures do, and each step gets a fair share, so that nothing hides the last step.
    """
    steps = report["steps"]
    room = MOST_LINES - _ENDING - 2 * len(steps)  # a head for each, and a line that says how many were left out
    failures = _shares([len(_broken(step)) for step in steps], room)
    figures = _shares([len(_headlines(step)) for step in steps], room - sum(failures))
    lines = []
    for step, most_failures, most_figures in zip(steps, failures, figures, strict=True):
        lines.append(_clipped(_head(step)))
        broken, measured = _broken(step), _headlines(step)
        lines += [_clipped(f"  FAILED {each['name']}: {each['text']}") for each in broken[:most_failures]]
        lines += [_clipped(f"  {each['name']}: {each['text']}") for each in measured[:most_figures]]
        hidden = len(broken) - most_failures, len(measured) - most_figures
        if any(hidden):
            lines.append(f"  ... {hidden[0]} more failures and {hidden[1]} more figures in report.md")
    return lines + _ending(report)


def _broken(step: dict[str, Any]) -> list[dict[str, Any]]:
    return [each for each in step["findings"] if each["ok"] is False]


def _headlines(step: dict[str, Any]) -> list[dict[str, Any]]:
    return [each for each in step["findings"] if each["headline"] and each["ok"] is not False]


def _shares(wanted: list[int], room: int) -> list[int]:
    """Return how many lines each gets: one more in turn, while there is room and something is wanted."""
    shares = [0] * len(wanted)
    while sum(shares) < min(room, sum(wanted)):
        for place, most in enumerate(wanted):
            if shares[place] < most and sum(shares) < room:
                shares[place] += 1
    return shares


def _head(step: dict[str, Any]) -> str:
    passed = sum(each["ok"] is True for each in step["findings"])
    counts = f"{passed} passed, {len(_broken(step))} failed"
    note = f"; {step['note']}" if step["note"] else ""
    return f"{step['name']}: {step['status'].upper()}, {counts}, {step['seconds']:.0f} of {step['budget']:.0f} s{note}"


def _ending(report: dict[str, Any]) -> list[str]:
    bad = [step["name"] for step in report["steps"] if step["status"] != "ok"]
    verdict = f"NOT OK: {', '.join(bad)}" if bad else "every step passed" if report["done"] else "so far nothing failed"
    where = "a rehearsal on a processor, whose figures mean nothing" if report["device"] == "cpu" else "on a GPU"
    return ["", _clipped(f"{len(report['steps'])} steps, {where}"), _clipped(verdict)]


def _clipped(line: str) -> str:
    line = " ".join(line.split()) if not line.startswith("  ") else "  " + " ".join(line.split())
    return line if len(line) <= WIDTH else line[: WIDTH - 3] + "..."
