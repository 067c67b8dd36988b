"""Show the progress bar of a command."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

from saccade.support.language import translated


@contextmanager
def progress(console: Console, what: str, total: int | None) -> Iterator[Callable[..., None]]:
    """Show a progress bar within the block, or nothing if the console is not a terminal.

    Args:
        console: the console to print to.
        what: the noun for the counted items.
        total: the number of items; None if unknown.

    Yields:
        ``advance(steps=1, what=None)``, which advances the bar and may change its description.
    """
    if not console.is_terminal:
        yield lambda steps=1, what=None: None
        return
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    with Progress(*columns, console=console, transient=True) as bar:
        task = bar.add_task(translated(what), total=total)

        def advance(steps: int = 1, what: str | None = None) -> None:
            bar.update(task, advance=steps, description=None if what is None else translated(what))

        yield advance
