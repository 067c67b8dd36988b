"""The command line: ``saccade look``, ``compare``, ``generate``, ``verify``, ``audit``, ``judge`` and ``cost``."""

import errno
import io
import os
import signal
import sys
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TextIO

__all__ = ["main"]

_NEEDED = ("typer", "rich", "tokenizers", "safetensors", "matplotlib")


def main() -> None:
    """Run the command line; if a package is missing, print how to install it."""
    try:
        with _sigterm_like_ctrl_c():
            _run()
    except KeyboardInterrupt:  # during imports; commands handle it themselves
        sys.exit(130)
    except OSError as error:
        if error.errno not in (errno.ENOSPC, errno.EDQUOT, errno.EIO):
            raise
        # Otherwise, Python would try to flush the remaining output at exit.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        sys.exit(f"saccade: the standard output must be writable; got {error.strerror}")


@contextmanager
def _sigterm_like_ctrl_c() -> Iterator[None]:
    """Handle SIGTERM like Ctrl-C within the block, so that incomplete files are removed."""
    before = signal.getsignal(signal.SIGTERM)
    if before is signal.SIG_DFL:  # keep other handlers in place
        signal.signal(signal.SIGTERM, signal.default_int_handler)
    try:
        yield
    finally:
        if before is signal.SIG_DFL:
            signal.signal(signal.SIGTERM, before)


def _run() -> None:
    try:
        from saccade.cli.app import command_line  # noqa: PLC0415  typer and rich are optional

        _escape_unencodable()
        warnings.showwarning = _print_warning
        command_line()
    except ImportError as error:  # including those of packages that a command imports later
        package = (error.name or "").partition(".")[0]
        if package not in _NEEDED:
            raise
        sys.exit(f"saccade: the command line needs {package}; pip install 'saccade-attention[cli]'")


def _print_warning(
    message: Warning | str,
    category: type[Warning],
    filename: str,
    lineno: int,
    file: TextIO | None = None,
    line: str | None = None,
) -> None:
    """Print the message of a warning without its source location."""
    print(f"saccade: {message}", file=sys.stderr if file is None else file)


def _escape_unencodable() -> None:
    """Escape characters that the terminal cannot encode, instead of raising an error."""
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="backslashreplace")
