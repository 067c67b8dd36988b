"""Ask the questions, print one table and write it down; the exit status says whether every target was met."""

import argparse
import sys
import time
from types import ModuleType

from benchmarks import (
    additive,
    bias,
    bigbird,
    compiled,
    decode,
    denoising,
    dropout,
    generation,
    growth,
    linear,
    longformer,
    looking,
    neighbourhood,
    plans,
    recording,
    reporting,
    short,
    sparse_decode,
    window,
)
from benchmarks.measuring import Referee
from benchmarks.reporting import Row

QUESTIONS: dict[str, ModuleType] = {
    "window": window,
    "longformer": longformer,
    "bigbird": bigbird,
    "compiled": compiled,
    "growth": growth,
    "dropout": dropout,
    "bias": bias,
    "additive": additive,
    "neighbourhood": neighbourhood,
    "denoising": denoising,
    "plans": plans,
    "short": short,
    "decode": decode,
    "sparse_decode": sparse_decode,
    "generation": generation,
    "linear": linear,
    "statistics": looking,
    "recording": recording,
}


def main(arguments: list[str]) -> int:
    """Ask the named questions, or all."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks", description=__doc__)
    parser.add_argument("questions", nargs="*", metavar="question", help=f"of {', '.join(QUESTIONS)}; all when none")
    parser.add_argument(
        "--wait", type=float, default=60.0, help="seconds to spend on waiting while the machine is busy"
    )
    given = parser.parse_args(arguments)
    unknown = [name for name in given.questions if name not in QUESTIONS]
    if unknown:
        print(f"benchmarks: question must be one of {', '.join(QUESTIONS)}; got {', '.join(unknown)}.", file=sys.stderr)
        return 2
    referee = Referee(patience=given.wait)
    answers: dict[str, list[Row]] = {}
    start = time.perf_counter()
    for name in dict.fromkeys(given.questions or QUESTIONS):
        question = QUESTIONS[name]
        rows = answers[question.TITLE] = []
        _tell(f"{time.perf_counter() - start:4.0f} s  {question.TITLE}")
        for row in question.measure(referee):
            rows.append(row)
            _tell(f"{time.perf_counter() - start:4.0f} s    {row.case}: {row.measured}")
        reporting.write(answers, referee)
    reporting.say(answers, referee)
    return 0 if all(row.met is not False for rows in answers.values() for row in rows) else 1


def _tell(text: str) -> None:
    print(text, file=sys.stderr, flush=True)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
