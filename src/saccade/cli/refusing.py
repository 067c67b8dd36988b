"""Ends of a command that a user's words bring about."""

from typing import NoReturn

import typer

from saccade.cli.loading import load
from saccade.models import Decoder, Encoder
from saccade.text import visible

__all__ = ["loaded", "refuse"]


def refuse(command: str, sentence: str) -> NoReturn:
    """End with one line that says what was wrong with the arguments, and exit status 2."""
    typer.echo(f"saccade {command}: {visible(sentence)}.", err=True)
    raise typer.Exit(2)


def loaded(command: str, model: str) -> Encoder | Decoder:
    """The model of that name or folder; where there is none, end with the reason and exit status 1."""
    try:
        return load(model)
    except (ValueError, ImportError, NotImplementedError, OSError) as error:
        lines = str(error).removeprefix("load: ").splitlines()
        typer.echo(f"saccade {command}: " + "\n".join(visible(line) for line in lines), err=True)
        raise typer.Exit(1) from None
