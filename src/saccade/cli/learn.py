"""``saccade compare --train``: train small models with different token mixers on recall tasks."""

import os
import sys
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import NoReturn

import typer
from rich.console import Console
from rich.table import Table
from rich.text import Text

from saccade import viz
from saccade.cli.exit_status import refuse
from saccade.cli.output_files import save_figure, writing
from saccade.cli.progress import progress
from saccade.learning import MIXERS, QUESTIONS, Outcome, Run, Settings, planned, run_all
from saccade.learning.runs import legend, names, rows, shares
from saccade.text import visible


def learn(
    only: Sequence[str],
    seeds: int,
    steps: int,
    runs: Path,
    workers: int | None,
    out: Path | None,
    *,
    as_markdown: bool,
) -> None:
    """Train small models, print the results, and draw them if ``out`` is given."""
    mixers, questions = _chosen(only, MIXERS), _chosen(only, QUESTIONS)
    for name in only:
        if name not in (*MIXERS, *QUESTIONS):
            _refuse_name(name)
    plan = planned(mixers, questions, seeds)
    if not plan:
        refuse("compare", f"--only must leave a mixer that the task can train; got {', '.join(only)}")
    errors = Console(stderr=True, highlight=False, markup=False, emoji=False)
    with writing("compare", "--runs", runs), progress(errors, "runs", len(plan)) as advance:
        try:
            outcomes = run_all(
                plan,
                runs,
                Settings(steps=steps),
                workers=workers or os.cpu_count() or 1,
                progress=lambda run: advance(1, f"{run.mixer}, {run.question}"),
            )
        except ValueError as error:
            refuse("compare", str(error).replace("run_all: folder", "--runs", 1))
    _print(outcomes, as_markdown=as_markdown)
    if out is not None:
        columns, rows_of = names(outcomes)
        figure = viz.heatmap(
            [list(line) for line in zip(*shares(outcomes), strict=True)],
            x_labels=columns,
            y_labels=rows_of,
            x_name="",
            y_name="",
            scale_name="accuracy",
            annotate=True,
            limits=(0.0, 1.0),
        )
        save_figure("compare", figure, out)


def _chosen(only: Sequence[str], names: Iterable[str]) -> list[str]:
    """Return the names of token mixers or tasks that ``only`` contains; if it contains none, return all names."""
    return [name for name in names if name in only] or list(names)


def _refuse_name(name: str) -> NoReturn:
    tasks, mixers = "; ".join(QUESTIONS), "; ".join(MIXERS)
    refuse("compare", f"--only must be a task or a mixer; got {name}\nTasks: {tasks}\nMixers: {mixers}")


def _print(outcomes: dict[Run, Outcome], *, as_markdown: bool) -> None:
    head, *lines = rows(outcomes)
    if as_markdown:
        for line in (head, ["---"] * len(head), *lines):
            typer.echo(f"| {' | '.join(line)} |")
    else:
        table = Table(*head, box=None)
        for line in lines:
            table.add_row(*map(Text, line))
        Console(file=sys.stdout, highlight=False, markup=False, emoji=False, width=10_000).print(table)
    typer.echo(f"\n{visible(legend(outcomes))}")
