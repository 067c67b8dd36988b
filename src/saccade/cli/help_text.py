"""Translate the help of the command line: its texts, its headings, and the words that Typer adds to options."""

import re
from collections.abc import Iterable
from typing import Any

import typer

from saccade.support.language import translated

_ADDED = re.compile(r"\b(?:default(?=: .*\]$)|required(?=\]$))")  # as in "[default: 32; x>=1]" after a help text


class _Formatter(typer.Context.formatter_class):  # type: ignore[misc, valid-type]
    """A help formatter that translates headings, and Typer's remarks on options, into the current language."""

    def write_usage(self, prog: str, args: str = "", prefix: str | None = None) -> None:
        super().write_usage(prog, args, f"{translated('Usage')}: " if prefix is None else prefix)

    def write_heading(self, heading: str) -> None:
        super().write_heading(translated(heading))

    def write_dl(self, rows: Iterable[tuple[str, str]], *layout: Any, **named: Any) -> None:
        shown = [(name, _ADDED.sub(lambda word: translated(word[0]), translated(text))) for name, text in rows]
        super().write_dl(shown, *layout, **named)


def translate_help(command: Any) -> None:
    """Translate all help texts of a command and its subcommands into the current language."""
    command.context_class = _Context
    command.help, command.epilog = (
        None if text is None else translated(text) for text in (command.help, command.epilog)
    )
    command.short_help = None if command.short_help is None else translated(command.short_help)
    for parameter in command.params:
        words = getattr(parameter, "help", None)
        if words:
            parameter.help = translated(words)
        if isinstance(getattr(parameter, "show_default", None), str):
            parameter.show_default = translated(parameter.show_default)
    for subcommand in getattr(command, "commands", {}).values():
        translate_help(subcommand)


def translate_headings(context: typer.Context) -> None:
    """Translate the help headings of a command whose context already exists."""
    context.formatter_class = _Formatter


class _Context(typer.Context):
    formatter_class = _Formatter
