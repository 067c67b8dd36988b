"""How a command ends where it cannot do what was asked: a sentence, and an exit status that says whose fault it is."""

from collections.abc import Callable, Sequence
from typing import NoReturn, TypeVar

import typer

from saccade.text import visible

__all__ = ["loaded", "refuse", "refuse_beside"]

Loaded = TypeVar("Loaded")


def refuse(command: str, sentence: str) -> NoReturn:
    """End with one line that says what was wrong with the arguments, and exit status 2."""
    typer.echo(f"saccade {command}: {visible(sentence)}.", err=True)
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


def loaded(command: str, load: Callable[[str], Loaded], model: str) -> Loaded:
    """What ``load`` makes of a name or folder; where it cannot, end with the reason and exit status 1."""
    try:
        return load(model)
    except (ValueError, ImportError, NotImplementedError, OSError) as error:
        lines = str(error).removeprefix("load: ").removeprefix(f"{command}: ").splitlines()
        typer.echo(f"saccade {command}: " + "\n".join(visible(line) for line in lines), err=True)
        raise typer.Exit(1) from None
