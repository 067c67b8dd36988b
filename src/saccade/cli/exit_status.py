"""End a command with a one-sentence error and an exit status that distinguishes wrong arguments from failures."""

from collections.abc import Callable, Sequence
from typing import NoReturn, TypeVar

import typer
from torch import nn

from saccade.cli.loading import check_name, check_numbers
from saccade.cli.transformers_model import TransformersModel
from saccade.text import visible

STATUSES = (
    "Exit status: 0 on success, 2 for wrong arguments, 1 for a failure during the run (a model that cannot be read, a "
    "full disk, a claim that is contradicted), 130 for an interruption (Ctrl-C, SIGTERM)."
)
"""The meaning of the exit status of every command."""

Loaded = TypeVar("Loaded", bound=nn.Module | TransformersModel)


def refuse(command: str, sentence: str) -> NoReturn:
    """End the command with an error message about wrong arguments and exit status 2.

    Args:
        command: the command's name.
        sentence: the message without a full stop; facts and a hint may follow on further lines.
    """
    _end(command, sentence, 2)


def fail(command: str, sentence: str) -> NoReturn:
    """End the command with an error message about a failure not caused by the arguments, and exit status 1."""
    _end(command, sentence, 1)


def refuse_combination(context: typer.Context, chosen: str, others: Sequence[str], why: str) -> None:
    """End the command if the user gave an option that has no effect together with ``chosen``.

    Args:
        context: the context of the command.
        chosen: an option that the user gave, such as "--json".
        others: the options that have no effect together with it.
        why: a few words that describe the effect of ``chosen``.
    """
    for option in _typed(context, others):
        refuse(context.info_name or "", f"{option} must be left out if {chosen} is given, which {why}")


def refuse_without(context: typer.Context, needed: str, others: Sequence[str]) -> None:
    """End the command if the user gave an option that only has an effect together with ``needed``."""
    for option in _typed(context, others):
        refuse(context.info_name or "", f"{option} must be used with {needed}")


def _typed(context: typer.Context, options: Sequence[str]) -> list[str]:
    names = {name: parameter.name for parameter in context.command.params for name in parameter.opts}
    sources = {option: context.get_parameter_source(names[option] or "") for option in options}
    return [option for option, source in sources.items() if source is not None and source.name == "COMMANDLINE"]


def loaded(command: str, load: Callable[[str], Loaded], model: str) -> Loaded:
    """Load a model by name or folder; if that fails, end the command with the reason and exit status 1.

    A model with NaN or infinite weights also counts as a failure. A wrong name or folder gives exit status 2.
    """
    try:
        check_name(model)
    except ValueError as error:
        refuse(command, _sentence(command, error))
    try:
        loaded_model = load(model)
        check_numbers(loaded_model.module if isinstance(loaded_model, TransformersModel) else loaded_model)
        return loaded_model
    except (ValueError, ImportError, NotImplementedError, OSError) as error:
        fail(command, _sentence(command, error))


def _sentence(command: str, error: Exception) -> str:
    return str(error).removeprefix("load: ").removeprefix(f"{command}: ")


def _end(command: str, sentence: str, status: int) -> NoReturn:
    """Print the error of a command and exit; invisible characters from files or arguments are escaped."""
    first, *others = sentence.removeprefix(f"{command}: ").split("\n")
    if not first.endswith((".", ":")):
        first += "."
    typer.echo(f"saccade {command}: " + "\n".join(map(visible, [first, *others])), err=True)
    raise typer.Exit(status)
