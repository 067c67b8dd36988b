"""The command line: ``python -m benchmarks.gpu_check``. Nothing but the standard library is needed to start it."""

from __future__ import annotations

import argparse
import signal
import sys
from pathlib import Path

from benchmarks.gpu_check.pages import publish
from benchmarks.gpu_check.runner import Options, run
from benchmarks.gpu_check.steps import ROOT, STEPS
from benchmarks.gpu_check.summary import summary

__all__ = ["main"]


def main(arguments: list[str]) -> int:
    """Run the steps and print the summary; the exit status says whether every step passed."""
    options = _parser().parse_args(arguments)
    if options.publish is not None:
        try:
            for path in publish(options.publish, ROOT):
                print(f"wrote {path}")
        except (OSError, ValueError, KeyError) as error:
            print(f"gpu_check: {error}", file=sys.stderr)
            return 2
        return 0
    chosen = [step for step in STEPS if not options.only or step.name in options.only]
    report = run(Options(options.device, options.quick, options.minutes, options.out, options.wheel), chosen)
    print("\n".join(summary(report.as_dict())), flush=True)
    return 0 if report.ok else 1


def _parser() -> argparse.ArgumentParser:
    names = [step.name for step in STEPS]
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.gpu_check",
        description="Check and time attention on a GPU. The report is rewritten after every step: out/gpu/report.md.",
    )
    parser.add_argument("--only", nargs="+", choices=names, metavar="STEP", help=f"of {', '.join(names)}")
    parser.add_argument("--minutes", type=_positive, default=9.0, help="for all steps together (default: 9)")
    parser.add_argument("--device", choices=["cuda", "cpu"], default="cuda", help="cpu: a rehearsal")
    parser.add_argument("--quick", action="store_true", help="the smallest sizes: does it run?")
    parser.add_argument("--out", type=Path, default=ROOT / "out" / "gpu", help="folder of the report")
    parser.add_argument("--wheel", type=Path, help="a wheel of saccade-cpu, for machines without a C++ compiler")
    parser.add_argument(
        "--publish",
        type=Path,
        metavar="REPORT",
        help="run nothing: put the figures of a report.json into the documents",
    )
    return parser


def _positive(text: str) -> float:
    minutes = float(text)
    if not 0.0 < minutes < 1000.0:
        raise argparse.ArgumentTypeError(f"must be a number of minutes above 0; got {text}")
    return minutes


if __name__ == "__main__":
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # end the step that is running as well
    sys.exit(main(sys.argv[1:]))
