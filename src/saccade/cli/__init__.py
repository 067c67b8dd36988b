"""The command line: ``saccade look``, ``compare``, ``generate`` and ``verify``."""

import io
import sys

__all__ = ["main"]

_NEEDED = ("typer", "rich")


def main() -> None:
    """Run the command line; without the packages it needs, say in one sentence how to get them."""
    try:
        from saccade.cli.app import app  # noqa: PLC0415  typer and rich are optional
    except ModuleNotFoundError as error:
        package = (error.name or "").partition(".")[0]
        if package not in _NEEDED:
            raise
        sys.exit(f"saccade: the command line needs {package}; pip install 'saccade[cli]'")
    for stream in (sys.stdout, sys.stderr):
        # A terminal that cannot show a character gets its escape: better than no answer at all.
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="backslashreplace")
    app()
