"""The progress bar of a command."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn


@contextmanager
def progress(console: Console, what: str, total: int | None) -> Iterator[Callable[..., None]]:
    """Show a progress bar within the block; nothing if the console is no terminal.

    Args:
        console: the console to print to.
        what: the noun of the counted things.
        total: their number; None if it is not known.

    Yields:
        ``advance(steps=1, what=None)``, which advances the bar and may change its description.
    """
    if not console.is_terminal:
        yield lambda steps=1, what=None: None
        return
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    with Progress(*columns, console=console, transient=True) as bar:
        task = bar.add_task(what, total=total)

        def advance(steps: int = 1, what: str | None = None) -> None:
            bar.update(task, advance=steps, description=what)

        yield advance
