"""Print which laws other libraries keep, or write it into documents: ``python -m benchmarks.peers [page ...]``."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from pathlib import Path

from benchmarks.generated_part import with_generated
from benchmarks.peers.table import COMMAND, LIBRARIES, command, find, written

__all__ = ["main"]


def main(arguments: Sequence[str] | None = None) -> None:
    """Try every law on other libraries' attention, and print the results or write them into documents."""
    names = [library.name for library in LIBRARIES]
    parser = argparse.ArgumentParser(prog=COMMAND, description=main.__doc__)
    parser.add_argument("page", nargs="*", type=Path, help="a document whose tables are replaced")
    parser.add_argument("--only", action="append", choices=names, help="one library, not all; may be repeated")
    options = parser.parse_args(arguments)
    for library in LIBRARIES:
        if options.only and library.name not in options.only:
            continue
        table = written(library, find(library.peers))
        for page in options.page:
            page.write_text(with_generated(page.read_text(encoding="utf-8"), command(library), table), encoding="utf-8")
        if not options.page:
            print(table)


if __name__ == "__main__":
    main()
