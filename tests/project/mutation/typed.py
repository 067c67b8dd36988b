"""Mutants that a type checker catches, found by their line numbers: mutmut would parse all mutants again for that.

The results are kept in the scratch copy until a mutant changes.
"""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any, NamedTuple

import mutmut.__main__ as mutmut
from mutmut.configuration import config
from mutmut.mutation.data import MutantLineSpans
from mutmut.type_checking import run_type_checker
from mutmut.utils.file_utils import change_cwd, walk_mutatable_files
from mutmut.utils.format_utils import get_mutant_name

_KEPT = Path("mutants", "types.json")


class _Error(NamedTuple):
    error_description: str


class _Caught(NamedTuple):
    error: _Error


def install() -> None:
    """Make mutmut use the results of the type checker that are read here."""
    mutmut.filter_mutants_with_type_checker = _caught


def _caught() -> dict[str, Any]:
    now = [[str(path), (Path("mutants") / path).stat().st_mtime] for path in walk_mutatable_files()]
    kept = json.loads(_KEPT.read_text()) if _KEPT.exists() else {}
    if kept.get("times") != now:
        with change_cwd("mutants"):
            found, root = run_type_checker(config().type_check_command), Path.cwd()
        errors = [(str(x.file_path.relative_to(root)), x.line_number, x.error_description) for x in found]
        kept = {"times": now, "errors": errors}
        _KEPT.write_text(json.dumps(kept))
    return _of_mutants(kept["errors"])


def _of_mutants(errors: list[tuple[str, int, str]]) -> dict[str, Any]:
    """Return errors by mutant, without those that the unchanged copy of a function has, too."""
    placed, spans = [], dict[str, Any]()
    for path, line, sentence in errors:
        if path not in spans:
            spans[path] = MutantLineSpans.load(path)
        own = [name for name, span in spans[path].span_by_function_name.items() if span.start <= line <= span.end]
        if not own:
            raise RuntimeError(f"{path}:{line}: {sentence}: in no mutant")
        placed.append((get_mutant_name(Path(path), own[0]), re.sub("[0-9]+|__mutmut_\\w+", "", sentence), sentence))
    copied = {(name.removesuffix("_orig"), said) for name, said, _ in placed if name.endswith("__mutmut_orig")}
    return {
        name: _Caught(_Error(sentence))
        for name, said, sentence in placed
        if (name.rpartition("_")[0], said) not in copied and not name.endswith("_orig")
    }
