"""How a command ends that cannot do what was asked: one sentence, and an exit status that says whose fault it is."""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import NoReturn, TypeVar

import typer
from torch import nn

from saccade.cli.loading import check_numbers
from saccade.cli.transformers_model import TransformersModel
from saccade.text import visible

__all__ = ["folder_for", "loaded", "refuse", "refuse_beside", "writing"]

Loaded = TypeVar("Loaded", bound=nn.Module | TransformersModel)


def refuse(command: str, sentence: str) -> NoReturn:
    """End with a sentence that says what was wrong with the arguments, and exit status 2.

    Args:
        command: what was called.
        sentence: without a full stop; facts and a hint may follow in lines of their own.
    """
    first, *others = sentence.split("\n")
    _say(command, [f"{first.removesuffix('.')}.", *others])
    raise typer.Exit(2)


def refuse_beside(context: typer.Context, chosen: str, others: Sequence[str], why: str) -> None:
    """End where an option was given that does nothing beside ``chosen``.

    Args:
        context: the command as it was called.
        chosen: the option that leaves nothing to them, as it is written.
        others: options, as they are written.
        why: what ``chosen`` does, in a few words.
    """
    names = {name: parameter.name for parameter in context.command.params for name in parameter.opts}
    for option in others:
        source = context.get_parameter_source(names[option] or "")
        if source is not None and source.name == "COMMANDLINE":
            refuse(context.info_name or "", f"{option} must be left out where {chosen} is given, which {why}")


@contextmanager
def writing(command: str, option: str, folder: Path) -> Iterator[None]:
    """Write into a folder meanwhile; end where it cannot be written."""
    try:
        yield
    except OSError as error:
        refuse(command, f"{option} must be a folder that can be written; got {folder} ({error.strerror})")


def folder_for(command: str, option: str, folder: Path) -> None:
    """Make a folder, or end where it cannot be made."""
    with writing(command, option, folder):
        folder.mkdir(parents=True, exist_ok=True)


def loaded(command: str, load: Callable[[str], Loaded], model: str) -> Loaded:
    """What ``load`` makes of a name or folder; where it cannot, end with the reason and exit status 1.

    So it ends with a model whose weights are not all numbers: nothing can be said of what it computes.
    """
    try:
        found = load(model)
        check_numbers(found.module if isinstance(found, TransformersModel) else found)
        return found
    except (ValueError, ImportError, NotImplementedError, OSError) as error:
        _say(command, str(error).removeprefix("load: ").removeprefix(f"{command}: ").split("\n"))
        raise typer.Exit(1) from None


def _say(command: str, lines: Sequence[str]) -> None:
    """Print lines; whatever is invisible in them, since they may come from outside, as its escape."""
    typer.echo(f"saccade {command}: " + "\n".join(map(visible, lines)), err=True)
