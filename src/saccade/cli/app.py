"""The Typer application of the command line: its commands, and their common options."""

import os
import sys
from collections.abc import Callable
from typing import Annotated, Any

import typer
from typer.core import TyperGroup

from saccade import __version__
from saccade.cli.audit import audit
from saccade.cli.compare import compare
from saccade.cli.cost import cost
from saccade.cli.exit_status import STATUSES
from saccade.cli.generate import generate
from saccade.cli.help_text import translate_headings, translate_help
from saccade.cli.judge import judge
from saccade.cli.look import look
from saccade.cli.verify import verify
from saccade.support.language import LANGUAGES, in_language, language_of
from saccade.text import visible


class _LanguageAnywhere(TyperGroup):
    """The group of commands, which takes ``--lang`` before and after the name of a command."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        stop = args.index("--") if "--" in args else len(args)
        for i, argument in enumerate(args[:stop]):
            name, equals, _ = argument.partition("=")
            if name == "--lang":
                after = i + (1 if equals else 2)
                args = [*args[i:after], *args[:i], *args[after:]]
                break
        parsed: list[str] = super().parse_args(ctx, args)
        return parsed


app = typer.Typer(
    name="saccade",
    cls=_LanguageAnywhere,
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,
)

_COMMANDS: dict[
    Callable[..., None], str
] = {  # in a terminal of 80 columns, the list of commands has 64 columns for each description
    look: "Show what a trained model attends to in a text.",
    compare: "Compare other token mixers with exact attention.",
    generate: "Continue a text with a language model.",
    verify: "Check claims about attention, theorem by theorem.",
    audit: "Check which tokens influence which outputs against a rule.",
    judge: "Check a kernel against the laws of attention.",
    cost: "Estimate what attention or a model costs, before it is run.",
}
for command, description in _COMMANDS.items():
    app.command(short_help=description, epilog=STATUSES)(command)


def _print_version(requested: bool) -> None:
    if requested:
        typer.echo(f"saccade {__version__}")
        raise typer.Exit


def _set_language(context: typer.Context, requested: str | None) -> None:
    """Set the language until the command ends."""
    if context.resilient_parsing:
        return
    if requested is not None and requested not in LANGUAGES:
        typer.echo(f"saccade: --lang must be {' or '.join(LANGUAGES)}; got {visible(requested)}.", err=True)
        raise typer.Exit(2)
    context.with_resource(in_language("zh" if requested == "zh" else "en" if requested else language_of(os.environ)))
    translate_help(context.command)
    translate_headings(context)


def command_line() -> None:
    """Run the command line, with help in the language of the system unless --lang is given."""
    command = typer.main.get_command(app)
    if not any(
        argument.partition("=")[0] == "--lang" for argument in sys.argv
    ):  # --help is handled before other options have values
        with in_language(language_of(os.environ)):
            translate_help(command)
    command()


@app.callback(epilog=STATUSES)
def _options(
    language: Annotated[
        str | None,
        typer.Option(
            "--lang",
            metavar="en|zh",
            help="The language: en or zh; by default that of LC_ALL, LC_MESSAGES or LANG.",
            callback=_set_language,
            is_eager=True,
        ),
    ] = None,
    version: Annotated[
        bool, typer.Option("--version", help="Print the version.", callback=_print_version, is_eager=True)
    ] = False,
) -> None:
    """Attention as a matrix you never have to build."""
