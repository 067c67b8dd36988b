"""Many runs: on several processes, each kept in a file of its own, so that what is there need not run again."""

from __future__ import annotations

import hashlib
import json
import multiprocessing
import os
import threading
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from pathlib import Path
from tempfile import NamedTemporaryFile
from typing import NamedTuple

import torch

from saccade.learning.mixers import MIXERS
from saccade.learning.task_presets import QUESTIONS
from saccade.learning.training import DEFAULT, Outcome, Settings, train
from saccade.support.errors import value_error
from saccade.support.validation import check_int

__all__ = ["Run", "planned", "run_all"]


class Run(NamedTuple):
    """One training: names of a mixer and of a question, and a seed."""

    mixer: str
    question: str
    seed: int

    @property
    def file_name(self) -> str:
        """Of the file that keeps its outcome."""
        return f"{self.question}-{self.mixer}-{self.seed}.json".replace(", ", "-").replace(" ", "-").lower()


def planned(mixers: Sequence[str], questions: Sequence[str], seeds: int) -> list[Run]:
    """All runs that are possible: mixers that see later tokens are not asked what stands there."""
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
    """Train all, on one core each.

    Args:
        runs: what to train.
        folder: where outcomes are kept, a file each; what is there already is read. Made where it is missing.
        settings: what all share.
        workers: processes.
        progress: called with each run once its outcome is there.

    Raises:
        ValueError: a file in the folder that is no outcome, or one of other settings.
    """
    check_int("workers", workers)
    folder.mkdir(parents=True, exist_ok=True)
    found = {run: outcome for run in runs if (outcome := _kept(folder / run.file_name, settings)) is not None}
    for run in found:
        progress(run)
    for run, outcome in _trained([run for run in runs if run not in found], settings, workers):
        _keep(folder / run.file_name, outcome, settings)
        found[run] = outcome
        progress(run)
    return {run: found[run] for run in runs}


def _trained(runs: list[Run], settings: Settings, workers: int) -> Iterator[tuple[Run, Outcome]]:
    """Runs as they end. Processes are begun anew, so that nothing that stands in this one decides about them."""
    if not runs:
        return
    context = multiprocessing.get_context("spawn")
    pool = ProcessPoolExecutor(workers, context, initializer=_begin)
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


def _begin() -> None:
    """One core, and no longer than the process that waits for the outcome, however that ends."""
    torch.set_num_threads(1)
    threading.Thread(target=_end_with_parent, daemon=True).start()


def _end_with_parent() -> None:
    parent = multiprocessing.parent_process()
    assert parent is not None
    parent.join()
    os._exit(1)


def _run(run: Run, settings: Settings) -> Outcome:
    return train(MIXERS[run.mixer], QUESTIONS[run.question], run.seed, settings)


def _kept(path: Path, settings: Settings) -> Outcome | None:
    """What a file keeps; None where there is none."""
    if not path.exists():
        return None
    hint = f"remove {path.name}, or choose another folder"
    try:
        kept = json.loads(path.read_text(encoding="utf-8"))
        outcome, others, checksum = Outcome(**kept["outcome"]), kept["settings"], kept["checksum"]
    except (ValueError, KeyError, TypeError) as error:
        raise value_error("folder", "hold outcomes of runs", f"{path}: {error}", hint=hint) from None
    if checksum != _checksum(outcome._asdict(), others):
        raise value_error("folder", "hold outcomes of runs", f"{path}, which was changed", hint=hint)
    if others != settings._asdict():
        raise value_error("folder", f"hold runs of {settings}", f"{path} of others", hint=hint)
    return outcome


def _keep(path: Path, outcome: Outcome, settings: Settings) -> None:
    """Write a file that is there whole or not at all."""
    kept = {"outcome": outcome._asdict(), "settings": settings._asdict()}
    text = json.dumps({**kept, "checksum": _checksum(**kept)}, indent=1)
    with NamedTemporaryFile("w", dir=path.parent, prefix=".", suffix=".part", delete=False, encoding="utf-8") as beside:
        beside.write(text + "\n")
    os.replace(beside.name, path)


def _checksum(outcome: dict[str, object], settings: dict[str, object]) -> str:
    return hashlib.sha256(json.dumps([outcome, settings], sort_keys=True).encode()).hexdigest()
