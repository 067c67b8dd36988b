"""Run the steps one after another, each in a process with a timeout, and rewrite the report whenever more is known."""

from __future__ import annotations

import os
import resource
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import NamedTuple

from benchmarks.gpu_check import finding
from benchmarks.gpu_check.report import Report, StepReport
from benchmarks.gpu_check.steps import ROOT, STEPS, Step

__all__ = ["Options", "run"]

_SHORTEST = 5.0  # seconds below which a step is not begun
_GRACE = 3.0  # seconds before its timeout at which a step should end by itself
_POLL = 1.0


class Options(NamedTuple):
    """The options of a run; see the command line."""

    device: str
    quick: bool
    minutes: float
    out: Path
    wheel: Path | None = None


def run(options: Options, steps: Sequence[Step] = STEPS) -> Report:
    """Run steps, and return the report, which has been written to ``options.out`` all along."""
    start = time.monotonic()
    ends = start + 60.0 * options.minutes
    planned = sum(step.seconds for step in steps)
    share = 60.0 * options.minutes / planned
    report = Report.begun(options.device, quick=options.quick, minutes=options.minutes, out=options.out)
    due = start  # when the steps so far should have ended: what one leaves over, the next may use
    for number, step in enumerate(steps, 1):
        due += share * step.seconds
        seconds = min(due, ends) - time.monotonic()
        print(f"[{number}/{len(steps)}] {step.name}: {step.title}, at most {seconds:.0f} s", flush=True)
        its = StepReport(step.name, step.title, max(0.0, seconds))
        report.steps.append(its)
        if seconds < min(_SHORTEST, share * step.seconds):
            its.status, its.note = "not run", "no time was left"
        else:
            _run_step(step, seconds, options, report)
        report.write()
        print(f"      {its.line()}", flush=True)
    report.done = True
    report.write()
    return report


def _run_step(step: Step, seconds: float, options: Options, report: Report) -> None:
    """Run one step in a process of its own, and note how it ended."""
    its, folder = report.steps[-1], options.out / "steps"
    folder.mkdir(parents=True, exist_ok=True)
    findings, log = folder / f"{step.name}.jsonl", folder / f"{step.name}.log"
    findings.unlink(missing_ok=True)
    report.write()
    began, spent = time.monotonic(), _cpu_seconds()
    with log.open("w", encoding="utf-8") as output:
        process = subprocess.Popen(
            _command(step, seconds, findings, options),
            stdout=output,
            stderr=subprocess.STDOUT,
            cwd=ROOT,
            env=_environment(),
            start_new_session=True,
        )
        try:
            code = _wait(process, began + seconds, its, findings, report)
        finally:
            _kill(process)  # compilers and tests that it started as well
    its.seconds, its.cpu_seconds = time.monotonic() - began, _cpu_seconds() - spent
    its.findings = finding.read(findings)
    if code is None:
        its.status, its.note = "timed out", f"killed after {its.seconds:.0f} s; the findings until then are kept"
    elif code:
        what = f"signal {signal.Signals(-code).name}" if code < 0 else f"exit status {code}"
        its.status, its.note = "crashed", f"{what}: {_tail(log)}"
    else:
        its.status = "failed" if any(each.ok is False for each in its.findings) else "ok"


def _wait(
    process: subprocess.Popen[bytes], deadline: float, its: StepReport, findings: Path, report: Report
) -> int | None:
    """Return the exit status of a step, None if it was still running at the deadline; keep the report current."""
    began, known = time.monotonic(), 0
    while True:
        try:
            return process.wait(max(0.01, min(_POLL, deadline - time.monotonic())))
        except subprocess.TimeoutExpired:
            its.findings = finding.read(findings)
            its.seconds = time.monotonic() - began
            if len(its.findings) > known:
                known = len(its.findings)
                report.write()
            if time.monotonic() >= deadline:
                return None


def _command(step: Step, seconds: float, findings: Path, options: Options) -> list[str]:
    soft = max(seconds - _GRACE, 0.8 * seconds)
    command = [sys.executable, "-m", "benchmarks.gpu_check.child", step.name]
    command += ["--findings", str(findings.absolute()), "--device", options.device, "--seconds", f"{soft:.1f}"]
    command += ["--quick"] * options.quick
    return command + ([] if options.wheel is None else ["--wheel", str(options.wheel.absolute())])


def _environment() -> dict[str, str]:
    """Return this process's environment, in which the package of this checkout is imported, and no network asked."""
    paths = [str(ROOT / "src"), str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])]
    offline = {"HF_HUB_OFFLINE": "1", "TRANSFORMERS_OFFLINE": "1"}
    return {**os.environ, **offline, "PYTHONPATH": os.pathsep.join(paths), "PYTHONUNBUFFERED": "1"}


def _kill(process: subprocess.Popen[bytes]) -> None:
    """End a step and every process that it started."""
    with suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)  # it leads a session of its own
    process.wait()


def _cpu_seconds() -> float:
    """Return the time that processors have spent on processes that this one has waited for."""
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    return used.ru_utime + used.ru_stime


def _tail(log: Path) -> str:
    """Return the last lines that a step printed."""
    lines = [line.strip() for line in log.read_text(encoding="utf-8", errors="replace").splitlines() if line.strip()]
    return " | ".join(lines[-3:])[-500:] or "it printed nothing"
