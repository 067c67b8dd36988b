"""Watch a command from a parent process, to report the trial in which a compiled kernel ends its process."""

from __future__ import annotations

import atexit
import ctypes
import mmap
import os
import signal
import sys
import time
from collections.abc import Callable
from typing import NoReturn

import typer
from rich.console import Console

from saccade.cli.exit_status import fail

_MOST_BYTES = 4096
_LOADED, _FINISHED = "while it was loaded", "after the last trial"
_PR_SET_PDEATHSIG = 1  # of prctl(2): the signal that a process gets when its parent ends


def watched(command: str, kernel: str) -> Callable[[str], None]:
    """Continue the command in a child process, and return a function with which the child announces each trial.

    The parent waits, and ends with the child's exit status. If a signal or a call of exit() ends the child, the parent
    ends with exit status 1 and prints the last trial. An interrupted parent stops the child. On systems other than
    Linux, the command continues in this process, unwatched.
    """
    if sys.platform != "linux":
        return lambda trial: None
    shared = mmap.mmap(-1, _MOST_BYTES)  # memory of both processes
    _write(shared, _LOADED)
    sys.stdout.flush()  # otherwise, both processes would write the text of the buffers
    sys.stderr.flush()
    child = os.fork()
    if child:
        _wait(command, kernel, child, shared)
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    atexit.register(_write, shared, _FINISHED)  # called when Python ends normally, but not by C's exit()
    return lambda trial: _write(shared, f"in the trial {trial}")


def _write(shared: mmap.mmap, place: str) -> None:
    shared[:] = place.encode()[:_MOST_BYTES].ljust(_MOST_BYTES, b"\0")


def _wait(command: str, kernel: str, child: int, shared: mmap.mmap) -> NoReturn:
    """Wait for the child process, and end the command with its exit status, or with an error if it crashed."""
    try:
        status = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
    except KeyboardInterrupt:
        _stop(child)
        raise
    place = shared[:].rstrip(b"\0").decode(errors="replace")
    if status >= 0 and place == _FINISHED:
        raise typer.Exit(status)
    Console(stderr=True).show_cursor()  # hidden by the progress bar
    got = f"exit status {status}" if status >= 0 else signal.Signals(-status).name
    fail(command, f"{kernel} must return from each call; got {got} {place}")


def _stop(child: int) -> None:
    """Wait a second for a child that was also interrupted, then terminate it, and finally kill it."""
    for number in (0, signal.SIGTERM, signal.SIGKILL):  # 0 sends nothing
        os.kill(child, number)
        for _ in range(20):
            if os.waitpid(child, os.WNOHANG)[0]:
                return
            time.sleep(0.05)
