"""``python -m benchmarks.code_bases [NAME ...]``: record and replace the attention of models of many code bases."""

from __future__ import annotations

import argparse
import dataclasses
import importlib.metadata
import json
import os
import sys
from collections.abc import Callable, Sequence
from fnmatch import fnmatch
from functools import partial
from pathlib import Path
from typing import Any

import torch

from benchmarks.code_bases.case import CASES
from benchmarks.code_bases.cases_in import load
from benchmarks.code_bases.recorded import judge_record
from benchmarks.code_bases.replaced import judge_replacement
from benchmarks.code_bases.table import counts, rates, verdict, written
from benchmarks.generated_part import with_generated
from benchmarks.survey.subprocess_pool import each_alone
from saccade.caches.files.tensor_files import write_whole

COMMAND = "python -m benchmarks.code_bases"
JUDGES: dict[str, Callable[..., Any]] = {"record": judge_record, "replace": judge_replacement}


def main(arguments: Sequence[str] | None = None) -> int:
    """Judge the cases, print the counts and write the results; return 1 if a verdict is "silent" or "wrong"."""
    parser = argparse.ArgumentParser(prog=COMMAND, description=main.__doc__)
    parser.add_argument("name", nargs="*", help="code bases or cases, with * for any characters; all when none")
    parser.add_argument(
        "--results", type=Path, default=Path("code_bases.json"), help="the file of the results, which is updated"
    )
    parser.add_argument("--page", nargs="*", type=Path, help="measure nothing: update the table of these pages")
    parser.add_argument("--jobs", type=int, default=os.cpu_count() or 1, help="number of parallel processes")
    parser.add_argument("--width", type=int, default=300, help="of printed reasons, in characters")
    parser.add_argument("--only", nargs="*", choices=tuple(JUDGES), default=tuple(JUDGES), help="columns of the table")
    options = parser.parse_args(arguments)
    if options.page is not None:
        results = json.loads(options.results.read_text("utf-8"))
        for page in options.page:
            text = page.read_text("utf-8")
            page.write_text(with_generated(text, COMMAND, written(results, page.parent.name)), "utf-8")
        return 0
    load()
    chosen = [one for one in CASES.values() if not options.name or any(_is_meant(one, name) for name in options.name)]
    work = [(one, what) for one in chosen for what in options.only]
    earlier = json.loads(options.results.read_text("utf-8"))["cases"] if options.results.exists() else {}
    shown = {key: earlier[key] for key in CASES if key in earlier}
    shown |= {
        one.key: {"code_base": one.code_base, "name": one.name, "is_rewritten": one.is_rewritten}
        | {what: answer for what, answer in earlier.get(one.key, {}).items() if what in JUDGES}
        for one in chosen
    }
    for place, answer in each_alone([partial(_judged, *one) for one in work], jobs=options.jobs):
        one, what = work[place]
        shown[one.key][what] = answer
        why = answer if isinstance(answer, str) else answer["why"]
        sys.stdout.write(f"{what:8}{one.key:50} {verdict(answer):9}{why[: options.width]}\n")
    shown = {key: one for key, one in shown.items() if not any(_is_missing(one.get(what)) for what in options.only)}
    results = {
        "versions": _versions({one["code_base"] for one in shown.values() if not one["is_rewritten"]}),
        "cases": shown,
    }
    write_whole(options.results, memoryview((json.dumps(results, indent=0, ensure_ascii=False) + "\n").encode()))
    bad = 0
    for what in options.only:
        found = {
            "cases": {
                key: {**one, "record": one.get("record", ""), "replace": one.get("replace", "")}
                for key, one in shown.items()
            }
        }
        right, models, whole, bases = rates(found, what)
        verdicts = counts(found)[what]
        bad += sum(verdicts.get(one, 0) for one in ("silent", "wrong", "broken"))
        sys.stdout.write(f"{what}: {right} of {models} models, {whole} of {bases} code bases; {verdicts}\n")
    return int(bad > 0)


def _judged(one: Any, what: str) -> dict[str, Any] | str:
    try:
        return dataclasses.asdict(JUDGES[what](one))
    except ModuleNotFoundError as error:
        return f"{_MISSING} {error.name}"
    except Exception as error:  # models may raise anything; the result holds it
        return f"{type(error).__name__}: {error}"


_MISSING = "not installed:"


def _is_missing(answer: object) -> bool:
    return isinstance(answer, str) and answer.startswith(_MISSING)


def _is_meant(one: Any, name: str) -> bool:
    return fnmatch(one.code_base, name) or fnmatch(one.key, name)


def _versions(packages: set[str]) -> dict[str, str]:
    versions = {"torch": torch.__version__}
    for package in sorted(packages, key=str.lower):
        versions[package] = importlib.metadata.version(package)
    return versions


if __name__ == "__main__":
    sys.exit(main())
