"""The report: every step and finding so far, as JSON and as a page to read. A file is replaced whole or not at all."""

from __future__ import annotations

import dataclasses
import json
import os
import platform
import sys
from collections.abc import Iterator
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from benchmarks.gpu_check.finding import Finding
from benchmarks.gpu_check.summary import summary

__all__ = ["Report", "StepReport", "replace"]


@dataclasses.dataclass
class StepReport:
    """A step as far as it has come.

    Attributes:
        name, title: of the step.
        budget: seconds that it may take.
        status: "running", "ok", "failed", "timed out", "crashed" or "not run".
        seconds: how long it has taken.
        cpu_seconds: of processors, in the step and what it started.
        findings: its results so far.
        note: why it did not end by itself.
    """

    name: str
    title: str
    budget: float
    status: str = "running"
    seconds: float = 0.0
    findings: list[Finding] = dataclasses.field(default_factory=list)
    note: str = ""
    cpu_seconds: float = 0.0

    @property
    def broken(self) -> list[Finding]:
        """The findings that are failures."""
        return [each for each in self.findings if each.ok is False]

    def line(self) -> str:
        """Return the step in one line."""
        passed = sum(each.ok is True for each in self.findings)
        took = f"{self.seconds:.0f} s ({self.cpu_seconds:.0f} s of processors)"
        others = len(self.findings) - passed - len(self.broken)
        told = f"{self.name}: {self.status}, {took}; {passed} passed, {len(self.broken)} failed, {others} others"
        return f"{told}; {self.note}" if self.note else told


@dataclasses.dataclass
class Report:
    """Everything known so far.

    Attributes:
        about: date, command, versions of Python and the system.
        device: "cuda", or "cpu" for a rehearsal.
        out: folder of ``report.json`` and ``report.md``.
        steps: those that have begun.
        done: whether the last one has ended.
    """

    about: dict[str, Any]
    device: str
    out: Path
    steps: list[StepReport] = dataclasses.field(default_factory=list)
    done: bool = False

    @classmethod
    def begun(cls, device: str, *, quick: bool, minutes: float, out: Path) -> Report:
        """Return an empty report."""
        about = {
            "date": datetime.now(UTC).isoformat(timespec="seconds"),
            "command": " ".join(sys.argv[1:]),
            "python": platform.python_version(),
            "system": f"{platform.system()} {platform.release()} {platform.machine()}",
            "quick": quick,
            "minutes": minutes,
        }
        return cls(about, device, out)

    @property
    def ok(self) -> bool:
        """True if every step ran to its end and found nothing wrong."""
        return self.done and all(step.status == "ok" for step in self.steps)

    def write(self) -> None:
        """Write both files."""
        replace(self.out / "report.json", json.dumps(self.as_dict(), indent=1, ensure_ascii=False, default=str) + "\n")
        replace(self.out / "report.md", "\n".join(self._page()) + "\n")

    def as_dict(self) -> dict[str, Any]:
        """Return what ``report.json`` holds."""
        steps = [{**vars(step), "findings": [each._asdict() for each in step.findings]} for step in self.steps]
        return {"about": self.about, "device": self.device, "done": self.done, "ok": self.ok, "steps": steps}

    def _page(self) -> Iterator[str]:
        yield from ("# GPU check", "")
        yield f"{self.about['date']}, Python {self.about['python']}, device {self.device}" + (
            "" if self.done else "; not finished"
        )
        yield from ("", "```text", *summary(self.as_dict()), "```")
        for step in self.steps:
            yield from ("", f"## {step.name}: {step.title}", "", step.line())
            if step.findings:
                yield from ("", "| | finding | result |", "|---|---|---|")
            for each in step.findings:
                mark = {True: "ok", False: "**FAILED**", None: ""}[each.ok]
                yield f"| {mark} | {_cell(each.name)} | {_cell(each.text)} |"


def _cell(text: str) -> str:
    return " ".join(text.split()).replace("|", "\\|")


def replace(path: Path, text: str) -> None:
    """Write a file beside its place and move it there, so that nobody reads half of it."""
    path.parent.mkdir(parents=True, exist_ok=True)
    draft = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        draft.write_text(text, encoding="utf-8")
        os.replace(draft, path)
    finally:
        draft.unlink(missing_ok=True)
