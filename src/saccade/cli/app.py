"""The Typer application of the command line: its commands, and their common options."""

from collections.abc import Callable
from typing import Annotated

import typer

from saccade import __version__
from saccade.cli.audit import audit
from saccade.cli.compare import compare
from saccade.cli.cost import cost
from saccade.cli.exits import STATUSES
from saccade.cli.generate import generate
from saccade.cli.look import look
from saccade.cli.verify import verify

app = typer.Typer(
    name="saccade", no_args_is_help=True, add_completion=False, pretty_exceptions_enable=False, rich_markup_mode=None
)

_COMMANDS: dict[
    Callable[..., None], str
] = {  # in a terminal of 80 columns, the list of commands has 64 columns for each description
    look: "Show what a trained model attends to in a text.",
    compare: "Compare other ways to mix tokens with exact attention.",
    generate: "Continue a text with a language model.",
    verify: "Check claims about attention, theorem by theorem.",
    audit: "Check which tokens influence which outputs against a rule.",
    cost: "Estimate what attention or a model costs, before it is run.",
}
for command, description in _COMMANDS.items():
    app.command(short_help=description, epilog=STATUSES)(command)


def _print_version(asked: bool) -> None:
    if asked:
        typer.echo(f"saccade {__version__}")
        raise typer.Exit


@app.callback(epilog=STATUSES)
def _options(
    version: Annotated[
        bool, typer.Option("--version", help="Print the version.", callback=_print_version, is_eager=True)
    ] = False,
) -> None:
    """Attention as a matrix you never have to build."""
