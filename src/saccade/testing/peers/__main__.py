"""``python -m saccade.testing.peers [page ...]``: print the tables, or write them into documents."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from pathlib import Path

from saccade.testing.peers.libraries import LIBRARIES
from saccade.testing.peers.table import COMMAND, command, find, written
from saccade.text.generated import with_generated

__all__ = ["main"]


def main(arguments: Sequence[str] | None = None) -> None:
    """Try every law on other libraries' attention, and print what was found or write it into documents."""
    names = [library.name for library in LIBRARIES]
    parser = argparse.ArgumentParser(prog=COMMAND, description=main.__doc__)
    parser.add_argument("page", nargs="*", type=Path, help="a document whose tables are to be made anew")
    parser.add_argument("--only", action="append", choices=names, help="one library, not all; may be repeated")
    given = parser.parse_args(arguments)
    for library in LIBRARIES:
        if given.only and library.name not in given.only:
            continue
        made = written(library, find(library.peers))
        for page in given.page:
            page.write_text(with_generated(page.read_text(encoding="utf-8"), command(library), made), encoding="utf-8")
        if not given.page:
            print(made)


if __name__ == "__main__":
    main()
