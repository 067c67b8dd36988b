"""``python -m saccade.testing.peers [page ...]``: print the table, or write it into documents."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from pathlib import Path

from saccade.testing.peers.table import COMMAND, find, written
from saccade.text.generated import with_generated

__all__ = ["main"]


def main(arguments: Sequence[str] | None = None) -> None:
    """Try every law on torch's own attention, and print what was found or write it into documents."""
    parser = argparse.ArgumentParser(prog=COMMAND, description=main.__doc__)
    parser.add_argument("page", nargs="*", type=Path, help="a document whose table is to be made anew")
    pages = parser.parse_args(arguments).page
    made = written(find())
    for page in pages:
        page.write_text(with_generated(page.read_text(encoding="utf-8"), COMMAND, made), encoding="utf-8")
    if not pages:
        print(made)


if __name__ == "__main__":
    main()
