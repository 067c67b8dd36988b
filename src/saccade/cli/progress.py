"""A bar that shows how far a command is."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn


@contextmanager
def progress(console: Console, what: str, total: int | None) -> Iterator[Callable[..., None]]:
    """Show a bar meanwhile, which goes away at the end; nothing where no terminal is.

    Args:
        console: where to.
        what: what is counted.
        total: how many there will be; None where nobody knows.

    Yields:
        ``advance(steps=1, what=None)``, which moves the bar on and may say what comes.
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
