"""How a command ends that cannot do what was asked: one sentence, and an exit status that says whose fault it is."""

from collections.abc import Callable, Sequence
from typing import NoReturn, TypeVar

import typer
from torch import nn

from saccade.cli.loading import check_name, check_numbers
from saccade.cli.transformers_model import TransformersModel
from saccade.text import visible

STATUSES = (
    "Exit status: 0 when all went well, 2 when what was typed cannot be done, 1 when something failed on the way (a "
    "model that cannot be read, a full disk, a claim that is contradicted), 130 when interrupted (Ctrl-C, SIGTERM)."
)
"""What the exit status of every command says."""

Loaded = TypeVar("Loaded", bound=nn.Module | TransformersModel)


def refuse(command: str, sentence: str) -> NoReturn:
    """End with a sentence that says what was wrong with the arguments, and exit status 2.

    Args:
        command: what was called.
        sentence: without a full stop; facts and a hint may follow in lines of their own.
    """
    _end(command, sentence, 2)


def fail(command: str, sentence: str) -> NoReturn:
    """End with a sentence that says what failed though it was asked for rightly, and exit status 1."""
    _end(command, sentence, 1)


def refuse_beside(context: typer.Context, chosen: str, others: Sequence[str], why: str) -> None:
    """End where an option was given that does nothing beside ``chosen``.

    Args:
        context: the command as it was called.
        chosen: the option that leaves nothing to them, as it is written.
        others: options, as they are written.
        why: what ``chosen`` does, in a few words.
    """
    for option in _typed(context, others):
        refuse(context.info_name or "", f"{option} must be left out where {chosen} is given, which {why}")


def refuse_without(context: typer.Context, needed: str, others: Sequence[str]) -> None:
    """End where an option was given that says something only beside ``needed``, which was not."""
    for option in _typed(context, others):
        refuse(context.info_name or "", f"{option} must come with {needed}")


def _typed(context: typer.Context, options: Sequence[str]) -> list[str]:
    names = {name: parameter.name for parameter in context.command.params for name in parameter.opts}
    sources = {option: context.get_parameter_source(names[option] or "") for option in options}
    return [option for option, source in sources.items() if source is not None and source.name == "COMMANDLINE"]


def loaded(command: str, load: Callable[[str], Loaded], model: str) -> Loaded:
    """What ``load`` makes of a name or folder; where it cannot, end with the reason and exit status 1.

    So it ends with a model whose weights are not all numbers: nothing can be said of what it computes. A name that is
    none, and no folder, was typed wrongly: exit status 2.
    """
    try:
        check_name(model)
    except ValueError as error:
        refuse(command, _told(command, error))
    try:
        found = load(model)
        check_numbers(found.module if isinstance(found, TransformersModel) else found)
        return found
    except (ValueError, ImportError, NotImplementedError, OSError) as error:
        fail(command, _told(command, error))


def _told(command: str, error: Exception) -> str:
    return str(error).removeprefix("load: ").removeprefix(f"{command}: ")


def _end(command: str, sentence: str, status: int) -> NoReturn:
    """Print lines; whatever is invisible in them, since they may come from outside, as its escape."""
    first, *others = sentence.removeprefix(f"{command}: ").split("\n")
    if not first.endswith((".", ":")):
        first += "."
    typer.echo(f"saccade {command}: " + "\n".join(map(visible, [first, *others])), err=True)
    raise typer.Exit(status)
