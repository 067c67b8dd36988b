"""``python -m benchmarks.survey [NAME ...]``: check the language models of transformers against all claims."""

from __future__ import annotations

import argparse
import dataclasses
import json
import os
import sys
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any

from benchmarks.generated_part import with_generated
from benchmarks.survey.table import written
from benchmarks.survey.versions import COMPARED, compared, versions_table
from saccade.caches.files.tensor_files import write_whole
from saccade.support.errors import missing_extra

COMMAND = "python -m benchmarks.survey"
IMPLEMENTATIONS = ("eager", "sdpa", "flex_attention")


def main(arguments: Sequence[str] | None = None) -> None:
    """Audit every language model of the installed transformers, small and random, and write the results.

    A survey that was ended continues with the models that it has not measured, if the versions are the same.
    """
    parser = argparse.ArgumentParser(prog=COMMAND, description=main.__doc__)
    parser.add_argument("name", nargs="*", help="kinds of models, such as llama; all when none")
    parser.add_argument("--by", nargs="*", choices=IMPLEMENTATIONS, default=IMPLEMENTATIONS, help="implementations")
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
        unfinished = options.results.with_suffix(".unfinished")
        survey = _survey(options.name, options.by, options.jobs, unfinished)
        _write(options.results, survey)
        unfinished.unlink()
        return
    results = json.loads(options.results.read_text("utf-8"))
    for page in options.page:
        text = page.read_text("utf-8")
        is_comparison = "changed" in results
        part = (versions_table if is_comparison else written)(results, page.parent.name)
        page.write_text(with_generated(text, COMPARED if is_comparison else COMMAND, part), "utf-8")


def _write(path: Path, results: dict[str, Any]) -> None:
    write_whole(path, memoryview((json.dumps(results, indent=0, ensure_ascii=False) + "\n").encode()))


def _survey(names: Sequence[str], implementations: Sequence[str], jobs: int, unfinished: Path) -> dict[str, Any]:
    import torch  # noqa: PLC0415

    try:
        import transformers  # noqa: PLC0415  # an extra
    except ModuleNotFoundError:
        raise missing_extra("transformers", "transformers") from None

    from benchmarks.survey.architectures import architectures  # noqa: PLC0415
    from benchmarks.survey.progress import Progress  # noqa: PLC0415
    from benchmarks.survey.result import Cell, measure  # noqa: PLC0415
    from benchmarks.survey.subprocess_pool import each_alone  # noqa: PLC0415

    def uncompiled(*cell: Any) -> Cell:
        # Flex runs uncompiled in this process, because compilation takes a minute for each length.
        os.environ["TORCHDYNAMO_DISABLE"] = "1"
        return measure(*cell)

    transformers.logging.set_verbosity_error()
    chosen = [one for one in architectures() if not names or one.name in names]
    measure(chosen[0], "eager")  # imports the packages before the processes fork
    cells = [(one, implementation) for one in chosen for implementation in implementations]
    versions = {"torch": torch.__version__, "transformers": transformers.__version__}
    progress = Progress(unfinished, versions)
    left = [(one, name) for one, name in cells if (one.key, name) not in progress.done]
    for place, answer in each_alone([partial(uncompiled, *cell) for cell in left], jobs=jobs):
        one, implementation = left[place]
        progress.add(one.key, implementation, answer if isinstance(answer, str) else dataclasses.asdict(answer))
        sys.stderr.write(f"\r{len(progress.done)} of {len(cells)}  {one.key:40}")
    results = {one.key: {name: progress.done[one.key, name] for name in implementations} for one in chosen}
    return {"versions": versions, "cells": results}


if __name__ == "__main__":
    main()
