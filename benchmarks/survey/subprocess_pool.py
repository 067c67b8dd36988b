"""Run each piece of work in a forked process, so that none can end or change another."""

from __future__ import annotations

import multiprocessing
import os
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from multiprocessing.connection import Connection, wait
from typing import Any

import torch


def each_alone(
    work: Sequence[Callable[[], Any]], *, jobs: int = 1, seconds: float = 300.0
) -> Iterator[tuple[int, Any]]:
    """Yield the index and the result of each piece of work; a text if its process ended without a result.

    Args:
        work: functions that return something that can be pickled.
        jobs: number of parallel processes.
        seconds: time limit of a process.

    Cost: a fork for each, some hundredths of a second.
    """
    context = multiprocessing.get_context("fork")
    waiting, running = list(enumerate(work)), dict[Any, tuple[int, Any, float]]()
    while waiting or running:
        while waiting and len(running) < jobs:
            place, piece = waiting.pop(0)
            here, there = context.Pipe(duplex=False)
            process = context.Process(target=_child, args=(piece, there), daemon=True)
            process.start()
            there.close()
            running[here] = (place, process, time.monotonic() + seconds)
        soonest = min(end for _, _, end in running.values())
        ready = wait(list(running), timeout=max(0.0, soonest - time.monotonic()))
        late = [here for here, (_, _, end) in running.items() if end <= time.monotonic() and here not in ready]
        for here in [*ready, *late]:
            place, process, _ = running.pop(here)
            yield place, _answer(here, process, seconds, is_late=here in late)


def _answer(here: Any, process: Any, seconds: float, *, is_late: bool) -> Any:
    if is_late:
        process.kill()
    try:
        result = f"took more than {seconds:.0f} s" if is_late else here.recv()
    except EOFError:
        process.join()
        result = f"ended its process (exit status {process.exitcode})"
    process.join()
    here.close()
    return result


def _child(piece: Callable[[], Any], there: Connection) -> None:
    torch.set_num_threads(1)
    devnull = os.open(os.devnull, os.O_WRONLY)
    for stream in (sys.stdout.fileno(), sys.stderr.fileno()):  # silence the warnings of models
        os.dup2(devnull, stream)
    there.send(piece())
