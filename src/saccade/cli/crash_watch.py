"""Watch a command from a parent process, to report the trial in which a compiled kernel crashes."""

from __future__ import annotations

import mmap
import os
import signal
import sys
from collections.abc import Callable
from typing import NoReturn

import typer

from saccade.cli.exit_status import fail

_MOST_BYTES = 4096


def watched(command: str, kernel: str) -> Callable[[str], None]:
    """Continue the command in a child process, which says what it tries next by calling the returned function.

    The parent waits, and ends with the child's exit status. If a signal ends the child, the parent ends with exit
    status 1 and prints the last trial. Elsewhere than on Linux, the command continues in this process, unwatched.
    """
    if sys.platform != "linux":
        return lambda trial: None
    shared = mmap.mmap(-1, _MOST_BYTES)  # memory of both processes
    child = os.fork()
    if child:
        _wait(command, kernel, child, shared)
    return lambda trial: shared.__setitem__(slice(None), trial.encode()[:_MOST_BYTES].ljust(_MOST_BYTES, b"\0"))


def _wait(command: str, kernel: str, child: int, shared: mmap.mmap) -> NoReturn:
    """Wait for the child process, and end the command as it ended."""
    status = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
    if status >= 0:
        raise typer.Exit(status)
    trial = shared[:].rstrip(b"\0").decode(errors="replace")
    name = signal.Signals(-status).name
    got = f"{name} in the trial {trial}" if trial else f"{name} while it was loaded"
    fail(command, f"{kernel} must return from each call; got {got}")
