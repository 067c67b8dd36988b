"""``python -m benchmarks.field``: judge the attention of the field, and write the results and the pages."""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Sequence
from fnmatch import fnmatch
from importlib.metadata import PackageNotFoundError
from pathlib import Path
from typing import Any

from benchmarks.field.entries import ENTRIES
from benchmarks.field.judged import SEED, judged
from benchmarks.field.table import written
from benchmarks.generated_part import with_generated
from saccade.caches.files.tensor_files import write_whole

__all__ = ["COMMAND", "main"]

COMMAND = "python -m benchmarks.field"
DOCS = Path(__file__).parents[2] / "docs"
RESULTS = DOCS / "field.json"
PAGES = tuple(DOCS / language / "field.md" for language in ("en", "zh"))


def main(arguments: Sequence[str] | None = None) -> int:
    """Judge the entries that run on the device, keep the results of the others, and write results and pages."""
    parser = argparse.ArgumentParser(prog=COMMAND, description=main.__doc__)
    parser.add_argument("name", nargs="*", help="entries, with * for any characters; all when none")
    parser.add_argument("--device", default="cpu", choices=("cpu", "cuda"), help="where the inputs are")
    parser.add_argument("--results", type=Path, default=RESULTS, help="the file of the results, which is updated")
    parser.add_argument("--page", nargs="*", type=Path, default=PAGES, help="pages whose tables are replaced")
    parser.add_argument("--only-pages", action="store_true", help="judge nothing: write the pages from the results")
    options = parser.parse_args(arguments)
    earlier = json.loads(options.results.read_text("utf-8"))["entries"] if options.results.exists() else []
    found: dict[tuple[str, str], dict[str, Any]] = {(one["key"], one["device"]): one for one in earlier}
    for entry in () if options.only_pages else ENTRIES:
        is_meant = not options.name or any(fnmatch(entry.key, name) for name in options.name)
        if options.device not in entry.devices or not is_meant:
            continue
        try:
            verdicts = judged(entry, options.device)
        except (PackageNotFoundError, ModuleNotFoundError) as missing:
            sys.stdout.write(f"{entry.key}: left as it was, {missing}\n")
            continue
        place = {"key": entry.key, "call": entry.peer.call, "device": options.device}
        found[entry.key, options.device] = place | verdicts
        broken = [name for name, law in verdicts["laws"].items() if law["verdict"] == "broken"]
        sys.stdout.write(f"{entry.key}: {', '.join(broken) or 'no law is broken'}\n")
        sys.stdout.flush()
        _write(options.results, found)
    results = _write(options.results, found)
    for page in options.page:
        old = page.read_text("utf-8")
        page.write_text(with_generated(old, COMMAND, written(results, page.parent.name)), "utf-8")
    return 0


def _write(path: Path, found: dict[tuple[str, str], dict[str, Any]]) -> dict[str, Any]:
    """Write the results in the order of the entries, and return them."""
    order = [(entry.key, device) for entry in ENTRIES for device in entry.devices]
    results = {"seed": SEED, "entries": [found[key] for key in order if key in found]}
    write_whole(path, memoryview((json.dumps(results, indent=0, ensure_ascii=False) + "\n").encode()))
    return results


if __name__ == "__main__":
    raise SystemExit(main())
