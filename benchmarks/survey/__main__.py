"""``python -m benchmarks.survey [NAME ...]``: check models of transformers and of other packages against all claims."""

from __future__ import annotations

import argparse
import dataclasses
import json
import os
import sys
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from benchmarks.generated_part import with_generated
from benchmarks.survey.table import written
from benchmarks.survey.versions import COMPARED, compared, versions_table
from saccade.caches.files.tensor_files import write_whole
from saccade.support.errors import missing_extra, value_error

if TYPE_CHECKING:
    from benchmarks.survey.result import Cell

COMMAND = "python -m benchmarks.survey"
PACKAGES = "python -m benchmarks.survey --part packages"
IMPLEMENTATIONS = ("eager", "sdpa", "flex_attention", "saccade")


def main(arguments: Sequence[str] | None = None) -> None:
    """Audit every language model of transformers, and models of other packages, small and random; write the results.

    A survey that was ended continues with the models that it has not measured, if the versions are the same.
    """
    parser = argparse.ArgumentParser(prog=COMMAND, description=main.__doc__)
    parser.add_argument("name", nargs="*", help="kinds of models, such as llama, or packages; all when none")
    parser.add_argument("--part", nargs="*", choices=PARTS, default=tuple(PARTS), help="what is measured")
    parser.add_argument("--add", action="store_true", help="keep the other cells of the results")
    parser.add_argument(
        "--by", nargs="*", choices=IMPLEMENTATIONS, default=IMPLEMENTATIONS, help="implementations in transformers"
    )
    parser.add_argument("--results", type=Path, default=Path("survey.json"), help="the file of the results")
    parser.add_argument("--page", nargs="*", type=Path, help="measure nothing: update the table of these pages")
    parser.add_argument("--compare", nargs="*", type=Path, help="results of several versions, oldest first, to compare")
    parser.add_argument("--jobs", type=int, default=os.cpu_count() or 1, help="number of parallel processes")
    options = parser.parse_args(arguments)
    if options.compare:
        surveys = [json.loads(path.read_text("utf-8")) for path in options.compare]
        _write(options.results, compared(surveys))
        return
    if options.page is None:
        _measure(options)
        return
    results = json.loads(options.results.read_text("utf-8"))
    for page in options.page:
        text, language = page.read_text("utf-8"), page.parent.name
        if "changed" in results:
            text = with_generated(text, COMPARED, versions_table(results, language))
        if "cells" in results:
            text = with_generated(text, COMMAND, written(results, language))
        if "packages" in results:
            text = with_generated(text, PACKAGES, written(results["packages"], language, packages=True))
        page.write_text(text, "utf-8")


class Part(NamedTuple):
    """A part of the survey: versions of its packages, all names that choose models of it, and the chosen cells."""

    versions: dict[str, str]
    names: set[str]
    work: list[tuple[str, str, Callable[[], Cell]]]


def _measure(options: argparse.Namespace) -> None:
    """Measure the parts that have one of the names, and write the results after each; other results are kept."""
    results: dict[str, Any] = json.loads(options.results.read_text("utf-8")) if options.results.exists() else {}
    parts = {name: PARTS[name](options.name, options.by) for name in options.part}
    if unknown := set(options.name).difference(*(part.names for part in parts.values())):
        rule = f"be kinds of models or packages of the parts {', '.join(parts)}"
        raise value_error("name", rule, ", ".join(sorted(unknown)))
    parts = {name: part for name, part in parts.items() if part.work}
    if not options.add:
        results = {name: one for name, one in results.items() if _part_of(name) not in parts}
    kept = {name: results.get("packages", {}) if name == "packages" else results for name in parts}
    for name, part in parts.items():
        _check_versions(kept[name].get("versions", {}), part.versions)
    for name, part in parts.items():
        unfinished = options.results.with_suffix(f".{name}.unfinished")
        cells = _cells(part.work, part.versions, options.jobs, unfinished)
        survey = _joined(kept[name], {"versions": part.versions, "cells": cells})
        results |= {"packages": survey} if name == "packages" else survey
        _write(options.results, results)
        unfinished.unlink()


def _part_of(name: str) -> str:
    return "packages" if name == "packages" else "transformers"


def _check_versions(kept: dict[str, str], installed: dict[str, str]) -> None:
    """Raise an error if the kept results are of another version of a package."""
    if kept | installed != installed | kept:
        hint = "leave out --add to replace the results"
        raise value_error("versions", f"be those of the results, {kept}", installed, hint=hint)


def _joined(kept: dict[str, Any], survey: dict[str, Any]) -> dict[str, Any]:
    """Return the kept cells of a survey, if there are any, with those of a new one, model by model."""
    if not kept.get("cells"):
        return survey
    names = sorted({**kept["cells"], **survey["cells"]})
    cells = {name: kept["cells"].get(name, {}) | survey["cells"].get(name, {}) for name in names}
    return {"versions": kept["versions"] | survey["versions"], "cells": cells}


def _write(path: Path, results: dict[str, Any]) -> None:
    write_whole(path, memoryview((json.dumps(results, indent=0, ensure_ascii=False) + "\n").encode()))


def _survey(names: Sequence[str], implementations: Sequence[str]) -> Part:
    import torch  # noqa: PLC0415

    try:
        import transformers  # noqa: PLC0415  # an extra
    except ModuleNotFoundError:
        raise missing_extra("transformers", "transformers") from None

    from benchmarks.survey.architectures import architectures  # noqa: PLC0415
    from benchmarks.survey.result import measure  # noqa: PLC0415

    def uncompiled(*cell: Any) -> Cell:
        # Flex runs uncompiled in this process, because compilation takes a minute for each length.
        os.environ["TORCHDYNAMO_DISABLE"] = "1"
        return measure(*cell)

    transformers.logging.set_verbosity_error()
    every = architectures()
    chosen = [one for one in every if not names or one.name in names]
    if chosen:
        measure(chosen[0], "eager")  # imports the packages before the processes fork
    work = [(one.key, name, partial(uncompiled, one, name)) for one in chosen for name in implementations]
    versions = {"torch": torch.__version__, "transformers": transformers.__version__}
    return Part(versions, {one.name for one in every}, work)


def _survey_packages(names: Sequence[str], _implementations: Sequence[str]) -> Part:
    """Return the models of packages, each as it is; a package that is not installed gives the reason as its result."""
    import torch  # noqa: PLC0415

    from benchmarks.survey.package_models import package_models, versions  # noqa: PLC0415
    from benchmarks.survey.package_result import measure_package  # noqa: PLC0415

    every = package_models()
    chosen = [one for one in every if not names or {one.key, one.distribution} & set(names)]
    work = [(one.key, "as it is", partial(measure_package, one)) for one in chosen]
    known = {name for one in every for name in (one.key, one.distribution)}
    return Part({"torch": torch.__version__} | versions(chosen), known, work)


def _cells(
    work: Sequence[tuple[str, str, Callable[[], Cell]]], versions: Mapping[str, str], jobs: int, unfinished: Path
) -> dict[str, dict[str, Any]]:
    """Measure the cells that are not in the unfinished file yet, and return all by model and implementation."""
    from benchmarks.survey.progress import Progress  # noqa: PLC0415
    from benchmarks.survey.subprocess_pool import each_alone  # noqa: PLC0415

    progress, results = Progress(unfinished, versions), dict[str, dict[str, Any]]()
    left = [one for one in work if one[:2] not in progress.done]
    for place, answer in each_alone([run for _, _, run in left], jobs=jobs):
        key, name, _ = left[place]
        progress.add(key, name, answer if isinstance(answer, str) else dataclasses.asdict(answer))
        sys.stderr.write(f"\r{len(progress.done)} of {len(work)}  {key:60}")
    for key, name, _ in work:
        results.setdefault(key, {})[name] = progress.done[key, name]
    return results


PARTS = {"transformers": _survey, "packages": _survey_packages}
"""The functions that return each part, for the names of models and implementations."""


if __name__ == "__main__":
    main()
