"""The benchmark command: run all or some questions, one custom comparison, or write the pages of figures."""

import sys
import time
from pathlib import Path
from typing import Annotated, Literal, NoReturn

import torch
import typer

from benchmarks import compare as comparing
from benchmarks import pages, reporting
from benchmarks.conditions import threads as with_threads
from benchmarks.mask_text import mask_of
from benchmarks.measuring import Referee
from benchmarks.problem import Problem
from benchmarks.questions import QUESTIONS
from benchmarks.reporting import Row
from benchmarks.sides import SIDES

app = typer.Typer(add_completion=False, pretty_exceptions_enable=False, rich_markup_mode=None)

Wait = Annotated[float, typer.Option(help="Seconds to spend on waiting while the machine is busy.")]


@app.command()
def ask(
    questions: Annotated[
        list[str] | None, typer.Argument(metavar="[QUESTION]...", help=f"Of {', '.join(QUESTIONS)}; all when none.")
    ] = None,
    wait: Wait = 60.0,
    quick: Annotated[bool, typer.Option(help="One round of everything: does it run? Figures mean little.")] = False,
    docs: Annotated[bool, typer.Option(help="Measure nothing: write the pages from the last run's results.")] = False,
) -> None:
    """Run the questions, print and save one table; exit with status 1 unless every target was met.

    `python -m benchmarks compare --help` tells how to compare a mask, shape and dtype of your own.
    """
    unknown = [name for name in questions or () if name not in QUESTIONS]
    if unknown:
        _refuse(f"question must be one of {', '.join(QUESTIONS)}; got {', '.join(unknown)}")
    if docs:
        for path in pages.write(reporting.OUT / "results.json", Path(__file__).parents[1]):
            typer.echo(f"wrote {path}")
        return
    referee = Referee(patience=0.0, most_rounds=1) if quick else Referee(patience=wait)
    answers: dict[str, list[Row]] = {}
    start = time.perf_counter()
    for name in dict.fromkeys(questions or QUESTIONS):
        question = QUESTIONS[name]
        rows = answers[question.TITLE] = []
        _tell(f"{time.perf_counter() - start:4.0f} s  {question.TITLE}")
        for row in question.measure(referee):
            rows.append(row)
            _tell(f"{time.perf_counter() - start:4.0f} s    {row.case}: {row.measured}")
        reporting.write(answers, referee)
    reporting.say(answers, referee)
    raise typer.Exit(0 if all(row.met is not False for rows in answers.values() for row in rows) else 1)


@app.command()
def compare(
    mask: Annotated[
        str | None, typer.Option(help="As in Python: 'Causal() & Window(256, 0)'; none when left out.")
    ] = None,
    shape: Annotated[str, typer.Option(help="batch,heads,tokens,width of the queries.")] = "1,8,8192,64",
    kv_heads: Annotated[int | None, typer.Option(min=1, help="Heads of keys and values.")] = None,
    dtype: Annotated[Literal["float32", "bfloat16", "float64"], typer.Option(help="Of all inputs.")] = "float32",
    dropout: Annotated[
        float, typer.Option(min=0.0, max=0.99, help="Probability with which a weight is dropped.")
    ] = 0.0,
    backward: Annotated[bool, typer.Option("--backward", help="With gradients of query, key and value.")] = False,
    peers: Annotated[str, typer.Option(help=f"Of {', '.join(SIDES)}, by commas.")] = "no-wheel,sdpa,sdpa+mask",
    threads: Annotated[int | None, typer.Option(min=1, help="As many as torch takes when left out.")] = None,
    busy: Annotated[bool, typer.Option("--busy", help="Again while two other processes keep two cores busy.")] = False,
    rounds: Annotated[int, typer.Option(min=1, help="Undisturbed rounds wanted.")] = 7,
    wait: Wait = 60.0,
) -> None:
    """Compare a mask, shape and dtype of your own with peers: checked against each other, then timed in turns."""
    names = [name.strip() for name in peers.split(",") if name.strip()]
    unknown = [name for name in names if name not in SIDES]
    if unknown:
        _refuse(f"--peers must be of {', '.join(SIDES)}; got {', '.join(unknown)}")
    sizes = [int(size) if size.strip().isdecimal() else 0 for size in shape.split(",")]
    if len(sizes) != 4 or min(sizes) < 1:
        _refuse(f"--shape must be batch,heads,tokens,width, at least 1 each; got {shape}")
    if kv_heads is not None and sizes[1] % kv_heads:
        _refuse(f"--kv-heads must divide the {sizes[1]} heads; got {kv_heads}")
    try:
        found = None if mask is None else mask_of(mask)
    except ValueError as error:
        _refuse(f"--mask: {error}")
    its = Problem(found, *sizes, kv_heads, getattr(torch, dtype), dropout, backward)
    with with_threads(threads or torch.get_num_threads()):
        referee = Referee(patience=wait)
        answers = {comparing.title(its): list(comparing.rows(its, names, referee, rounds, is_busy=busy))}
        reporting.say(answers, referee)
        typer.echo(f"wrote {reporting.write(answers, referee, name='compare.json')}")


def main(arguments: list[str]) -> int:
    """Run the command line; returns its exit status."""
    try:
        app(arguments if arguments[:1] == ["compare"] else ["ask", *arguments], prog_name="python -m benchmarks")
    except SystemExit as end:
        return int(end.code or 0)
    return 0


def _refuse(sentence: str) -> NoReturn:
    typer.echo(f"benchmarks: {sentence}.", err=True)
    raise typer.Exit(2)


def _tell(text: str) -> None:
    print(text, file=sys.stderr, flush=True)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
