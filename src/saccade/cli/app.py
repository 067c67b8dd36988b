"""The commands and the options that all of them share."""

from typing import Annotated

import typer

from saccade import __version__
from saccade.cli.audit import audit
from saccade.cli.compare import compare
from saccade.cli.cost import cost
from saccade.cli.generate import generate
from saccade.cli.look import look
from saccade.cli.refusal import STATUSES
from saccade.cli.verify import verify

__all__ = ["app"]

app = typer.Typer(
    name="saccade", no_args_is_help=True, add_completion=False, pretty_exceptions_enable=False, rich_markup_mode=None
)
for command in (look, compare, generate, verify, audit, cost):
    app.command(epilog=STATUSES)(command)


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
