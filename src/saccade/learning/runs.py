"""Train models in several processes, save each outcome in a file, and tabulate the outcomes."""

from __future__ import annotations

import hashlib
import json
import math
import multiprocessing
import os
import statistics
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from pathlib import Path
from tempfile import NamedTemporaryFile
from typing import NamedTuple

import torch

from saccade.learning.mixers import MIXERS
from saccade.learning.task_presets import QUESTIONS
from saccade.learning.training import DEFAULT, SOLVED, Outcome, Settings, train
from saccade.support.errors import value_error
from saccade.support.language import translated
from saccade.support.validation import check_int
from saccade.tasks import IGNORED


class Run(NamedTuple):
    """A training run, identified by the names of a mixer and a task and by a seed."""

    mixer: str
    question: str
    seed: int

    @property
    def file_name(self) -> str:
        """Name of the file with the run's outcome."""
        return f"{self.question}-{self.mixer}-{self.seed}.json".replace(", ", "-").replace(" ", "-").lower()


def planned(mixers: Sequence[str], questions: Sequence[str], seeds: int) -> list[Run]:
    """Return the training runs of all combinations of mixers, tasks and seeds.

    Mixers that attend to later tokens skip tasks whose sequences contain the answers.
    """
    return [
        Run(mixer, question, seed)
        for seed in range(check_int("seeds", seeds))
        for question in questions
        for mixer in mixers
        if not MIXERS[mixer].sees_later or QUESTIONS[question].hides_answers
    ]


def run_all(
    runs: Sequence[Run],
    folder: Path,
    settings: Settings = DEFAULT,
    *,
    workers: int = 1,
    progress: Callable[[Run], object] = lambda run: None,
) -> dict[Run, Outcome]:
    """Train all runs, each on one core.

    Args:
        runs: the runs to train.
        folder: folder with one file for each outcome, created if missing. Runs with an existing outcome are not
            repeated.
        settings: settings of all runs.
        workers: number of processes.
        progress: called with each finished run.

    Raises:
        ValueError: a file in the folder is not an outcome, or belongs to different settings.
    """
    check_int("workers", workers)
    folder.mkdir(parents=True, exist_ok=True)
    outcomes = {run: outcome for run in runs if (outcome := _load(folder / run.file_name, settings)) is not None}
    for run in outcomes:
        progress(run)
    for run, outcome in _train_all([run for run in runs if run not in outcomes], settings, workers):
        _save(folder / run.file_name, outcome, settings)
        outcomes[run] = outcome
        progress(run)
    return {run: outcomes[run] for run in runs}


def _train_all(runs: list[Run], settings: Settings, workers: int) -> Iterator[tuple[Run, Outcome]]:
    """Train all runs in several processes, and yield the runs with their outcomes as they finish.

    Processes are spawned, so that they do not inherit the state of this process.
    """
    if not runs:
        return
    context = multiprocessing.get_context("spawn")
    pool = ProcessPoolExecutor(workers, context, initializer=_initialize_worker)
    try:
        waiting = {pool.submit(_run, run, settings): run for run in runs}
        for done in as_completed(waiting):
            yield waiting[done], done.result()
    except BaseException:
        for process in list((pool._processes or {}).values()):
            process.terminate()
        raise
    finally:
        pool.shutdown(cancel_futures=True)


def _initialize_worker() -> None:
    """Set up a process for training runs: it uses one thread and exits when the parent process does."""
    torch.set_num_threads(1)
    threading.Thread(target=_end_with_parent, daemon=True).start()


def _end_with_parent() -> None:
    parent = multiprocessing.parent_process()
    assert parent is not None
    parent.join()
    os._exit(1)


def _run(run: Run, settings: Settings) -> Outcome:
    return train(MIXERS[run.mixer], QUESTIONS[run.question], run.seed, settings)


def _load(path: Path, settings: Settings) -> Outcome | None:
    """Read the outcome of a training run from its file. If there is no file, return None."""
    if not path.exists():
        return None
    hint = f"remove {path.name}, or choose another folder"
    try:
        contents = json.loads(path.read_text(encoding="utf-8"))
        outcome, others, checksum = Outcome(**contents["outcome"]), contents["settings"], contents["checksum"]
    except (ValueError, KeyError, TypeError) as error:
        raise value_error("folder", "contain outcomes of runs", f"{path}: {error}", hint=hint) from None
    if checksum != _checksum(outcome._asdict(), others):
        raise value_error("folder", "contain outcomes of runs", f"{path}, which was changed", hint=hint)
    if others != settings._asdict():
        raise value_error("folder", f"contain runs with {settings}", f"{path} with other settings", hint=hint)
    return outcome


def _save(path: Path, outcome: Outcome, settings: Settings) -> None:
    """Write the outcome of a training run to its file atomically."""
    contents = {"outcome": outcome._asdict(), "settings": settings._asdict()}
    text = json.dumps({**contents, "checksum": _checksum(**contents)}, indent=1)
    with NamedTemporaryFile("w", dir=path.parent, prefix=".", suffix=".part", delete=False, encoding="utf-8") as file:
        file.write(text + "\n")
    os.replace(file.name, path)


def _checksum(outcome: dict[str, object], settings: dict[str, object]) -> str:
    return hashlib.sha256(json.dumps([outcome, settings], sort_keys=True).encode()).hexdigest()


_NO_RUN = "-"
_SAMPLE = 2000  # number of sequences in which the most common answer is counted


def rows(outcomes: Mapping[Run, Outcome]) -> list[list[str]]:
    """Return the rows of the outcome table: headings, one row per mixer, and the share of the most common answer.

    If a mixer learned a task with all seeds, the cell contains the mean number of training steps. Otherwise, it
    contains the mean share of correct answers and the range over seeds.
    """
    mixers, questions = names(outcomes)
    lines = [["", *questions]]
    lines += [[mixer, *(_cell(_select(outcomes, mixer, question)) for question in questions)] for mixer in mixers]
    return [
        *lines,
        [translated("the most common answer"), *(f"{_commonest_share(question):.2f}" for question in questions)],
    ]


def names(outcomes: Mapping[Run, Outcome]) -> tuple[list[str], list[str]]:
    """Return two lists, the names of the mixers and of the tasks in the outcomes, in order of appearance."""
    both = [run.mixer for run in outcomes], [run.question for run in outcomes]
    return list(dict.fromkeys(both[0])), list(dict.fromkeys(both[1]))


def shares(outcomes: Mapping[Run, Outcome]) -> list[list[float]]:
    """Return each mixer's mean share of correct answers in each task, one row per mixer; NaN marks missing runs."""
    mixers, questions = names(outcomes)
    cells = [[[x.accuracy for x in _select(outcomes, mixer, question)] for question in questions] for mixer in mixers]
    return [[statistics.mean(cell) if cell else math.nan for cell in line] for line in cells]


def legend(outcomes: Mapping[Run, Outcome]) -> str:
    """Return the legend of the outcome table: the meaning of its cells, and the cost of the runs."""
    seeds, minutes = len({run.seed for run in outcomes}), sum(outcome.seconds for outcome in outcomes.values()) / 60
    return translated(
        "Share of correct answers to new texts, mean over {seeds} (lowest to highest), or the number of steps in which "
        "all learned ({solved:.0%} correct). {runs} runs, {minutes:.0f} minutes of one core.",
        seeds=translated("{number:,} seed" if seeds == 1 else "{number:,} seeds", number=seeds),
        solved=SOLVED,
        runs=len(outcomes),
        minutes=minutes,
    )


def _select(outcomes: Mapping[Run, Outcome], mixer: str, question: str) -> list[Outcome]:
    return [outcomes[run] for run in outcomes if run[:2] == (mixer, question)]


def _cell(outcomes: Sequence[Outcome]) -> str:
    if not outcomes:
        return _NO_RUN
    shares = [outcome.accuracy for outcome in outcomes]
    if min(shares) >= SOLVED:
        steps = round(statistics.mean(outcome.steps for outcome in outcomes))
        return translated("learned, {steps}", steps=steps)
    mean = f"{statistics.mean(shares):.2f}"
    if len(shares) == 1:
        return mean
    return translated("{mean} ({least:.2f} to {most:.2f})", mean=mean, least=min(shares), most=max(shares))


def _commonest_share(question: str) -> float:
    targets = QUESTIONS[question].make(_SAMPLE, 0).targets
    asked = targets[targets != IGNORED]
    return float(asked.bincount().max() / len(asked))
