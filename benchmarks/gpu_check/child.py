"""The process of one step: run it, and write each finding to a file before the next one is looked for."""

from __future__ import annotations

import argparse
import importlib
import sys
import time
import warnings
from pathlib import Path

from benchmarks.gpu_check import finding
from benchmarks.gpu_check.device import device_named
from benchmarks.gpu_check.finding import Finding
from benchmarks.gpu_check.steps import STEPS, Context, level_of

__all__ = ["main", "run"]


def run(name: str, context: Context, findings: Path) -> None:
    """Run a step and write down what it finds."""
    step, known = importlib.import_module(f"benchmarks.gpu_check.{name}"), set()
    for each in step.measure(context):
        for one in [each, *_accused(known)]:
            finding.append(findings, one)
            print(f"{context.left():5.0f} s left  {one.name}: {one.text}", flush=True)


def _accused(known: set[str]) -> list[Finding]:
    """Return what the check of first use has said against kernels since the last time."""
    if "saccade.engine.first_use_check.registry" not in sys.modules:
        return []
    from saccade.engine.first_use_check import registry  # noqa: PLC0415  the step may not need it

    said = [record.result for record in list(registry._RECORDS.values()) if not record.result.ok]
    new = [found for found in said if found.fault not in known]
    known.update(found.fault for found in new)
    return [Finding(f"{found.kernel}: first use", found.fault, False) for found in new]


def main(arguments: list[str]) -> None:
    """Read the options that the runner passes."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.gpu_check.child")
    parser.add_argument("step", choices=[step.name for step in STEPS])
    parser.add_argument("--findings", type=Path, required=True)
    parser.add_argument("--device", choices=["cuda", "cpu"], required=True)
    parser.add_argument("--quick", action="store_true")
    parser.add_argument("--seconds", type=float, required=True)
    parser.add_argument("--wheel", type=Path)
    options = parser.parse_args(arguments)
    ends = time.monotonic() + options.seconds
    warnings.simplefilter("default")
    device = device_named(options.device)
    device.prepare()
    run(
        options.step,
        Context(device, level_of(options.device, quick=options.quick), ends, options.wheel),
        options.findings,
    )


if __name__ == "__main__":
    main(sys.argv[1:])
