"""The command line: ``saccade look``, ``compare``, ``generate`` and ``verify``."""

import errno
import io
import os
import signal
import sys
from collections.abc import Iterator
from contextlib import contextmanager

__all__ = ["main"]

_NEEDED = ("typer", "rich", "tokenizers", "safetensors", "matplotlib")


def main() -> None:
    """Run the command line; without the packages it needs, say in one sentence how to get them."""
    try:
        with _ended_as_by_ctrl_c():
            _run()
    except KeyboardInterrupt:  # while packages are imported; commands end alike
        sys.exit(130)
    except OSError as error:
        if error.errno not in (errno.ENOSPC, errno.EDQUOT, errno.EIO):
            raise
        # What could not be written would be tried again at the end.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        sys.exit(f"saccade: the standard output must be writable; got {error.strerror}")


@contextmanager
def _ended_as_by_ctrl_c() -> Iterator[None]:
    """Whoever ends the process (SIGTERM) interrupts it, so that half-written files go; else it would just be gone."""
    before = signal.getsignal(signal.SIGTERM)
    if before is signal.SIG_DFL:  # not where someone else has decided
        signal.signal(signal.SIGTERM, signal.default_int_handler)
    try:
        yield
    finally:
        if before is signal.SIG_DFL:
            signal.signal(signal.SIGTERM, before)


def _run() -> None:
    try:
        from saccade.cli.app import app  # noqa: PLC0415  typer and rich are optional

        _escape_what_a_terminal_lacks()
        app()
    except ImportError as error:  # also of what a command imports when it needs it
        package = (error.name or "").partition(".")[0]
        if package not in _NEEDED:
            raise
        sys.exit(f"saccade: the command line needs {package}; pip install 'saccade-attention[cli]'")


def _escape_what_a_terminal_lacks() -> None:
    """Better than no answer at all."""
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="backslashreplace")
