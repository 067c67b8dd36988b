"""Run the questions and print a table; the exit status says whether every target was met."""

import sys

import torch
from rich.console import Console
from rich.table import Table

from benchmarks import short, window
from benchmarks.measuring import matmul_rate

QUESTIONS = {"short": short, "window": window}


def main(names: list[str]) -> int:
    """Run the named questions, or all."""
    unknown = [name for name in names if name not in QUESTIONS]
    if unknown:
        print(f"benchmarks: question must be one of {', '.join(QUESTIONS)}; got {', '.join(unknown)}.", file=sys.stderr)
        return 2
    peak = max(matmul_rate() for _ in range(5))
    console = Console(width=160)
    console.print(
        f"torch {torch.__version__}, {torch.get_num_threads()} threads, {torch.backends.cpu.get_cpu_capability()}, "
        f"dense float32 product {peak / 1e9:.0f} GFLOP/s"
    )
    table = Table("question", "measured", "target", "met")
    missed = 0
    for name in names or list(QUESTIONS):
        for question, measured, target, met in QUESTIONS[name].main(peak):
            table.add_row(question, measured, target, "yes" if met else "no")
            missed += not met
    console.print(table)
    return 1 if missed else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
