"""Write the output files of a command: all of them when they are complete, or none if the run is interrupted."""

import errno
import os
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING

import typer

from saccade import viz
from saccade.cli.exit_status import fail, refuse
from saccade.support.language import translated
from saccade.text import visible

if TYPE_CHECKING:
    from matplotlib.figure import Figure

_FAILURES = (errno.ENOSPC, errno.EDQUOT, errno.EIO)  # a different path would fail too


@contextmanager
def writing(command: str, option: str, path: Path, kind: str = "folder") -> Iterator[None]:
    """A context manager that ends the command with an error message if writing to the path fails."""
    try:
        yield
    except OSError as error:
        end = fail if error.errno in _FAILURES else refuse
        end(command, f"{option} must be a {kind} that can be written; got {path} ({error.strerror})")


def save_figure(command: str, figure: "Figure", out: Path) -> None:
    """Write a figure to the ``--out`` file and print its path; end the command if it cannot be written."""
    try:
        with writing(command, "--out", out, "picture file"):
            path = viz.save(figure, out)
    except ValueError as error:
        refuse(command, f"--out must be a picture file that can be written; got {out} ({error})")
    typer.echo(translated("wrote {path}", path=visible(str(path))))


@contextmanager
def folder_for(command: str, option: str, folder: Path) -> Iterator[None]:
    """A context manager that creates an output folder, and removes it at the end if it is new and still empty.

    If the folder cannot be created, end the command with an error message.
    """
    new = [path for path in (folder, *folder.parents) if not path.exists()]
    try:
        with writing(command, option, folder):
            folder.mkdir(parents=True, exist_ok=True)
        yield
    finally:
        for path in new:
            with suppress(OSError):  # not empty
                path.rmdir()


@contextmanager
def all_or_none(command: str, option: str, folder: Path) -> Iterator[Path]:
    """A context manager that yields a temporary folder, and moves its files to ``folder`` unless the block fails."""
    with writing(command, option, folder), TemporaryDirectory(prefix=".", suffix=".part", dir=folder) as staging:
        yield Path(staging)
        for path in sorted(Path(staging).iterdir()):
            os.replace(path, folder / path.name)
