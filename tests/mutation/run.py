"""A mutation run: each package is changed in one place at a time, and some test must notice.

``python tests/mutation/run.py [package ...]`` makes a scratch copy for each package, runs mutmut in it, and prints a
table. What survives is compared with the lists in ``accepted/``: a survivor that stands in none of them fails the run.
A run that was stopped goes on where it was.

Not changed: what only changes sentences (`words`), functions with decorators other than property, and modules' tables.
"""

from __future__ import annotations

import argparse
import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from contextlib import chdir
from pathlib import Path
from typing import NamedTuple

from accepted import accepted
from results import Survivor, counts, survivors

HERE = Path(__file__).parent
ROOT = HERE.parent.parent


class Package(NamedTuple):
    """What is changed, and the tests that are run for it: few of all, and fast ones."""

    parts: tuple[str, ...]
    tests: tuple[str, ...]


_WRITTEN_DOWN = "tests/test_written_down.py::test_masks_survive_as_numbers_and_tensors"
_KERNELS = ("fused", "fused_threads", "tiled", "nonfinite", "empty_tops", "few_rows", "choice", "sdpa", "native")
_ENGINE = (
    *("tests/mutation/case_by_case.py", "tests/matrix", "tests/test_dropout.py", "tests/test_grouping.py"),
    *("tests/test_row_order.py", *(f"tests/kernels/test_{name}.py" for name in _KERNELS)),
)
PACKAGES = {
    "masks": Package(("masks", "plan"), ("tests/masks", "tests/test_plan.py", "tests/test_spans.py", _WRITTEN_DOWN)),
    "engine": Package(("engine",), _ENGINE),
    "caches": Package(("caches",), ("tests/caches",)),
}
_SETTINGS = """
[tool.mutmut]
source_paths = ["src"]
only_mutate = {files}
pytest_add_cli_args_test_selection = {tests}
pytest_add_cli_args = ["-m", "not slow and not gpu", "-p", "no:cacheprovider", "-p", "no:xdist", "-k", "not compiled"]
process_isolation = "forkserver"
use_git_change_detection = false
track_dependencies = false
timeout_multiplier = 4.0
timeout_constant = 10.0
type_check_command = {types}
"""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("packages", nargs="*", default=list(PACKAGES), help=f"of {', '.join(PACKAGES)}; all by default")
    parser.add_argument("--scratch", type=Path, default=ROOT / "out" / "mutants", help="where the copies are made")
    parser.add_argument("--processes", type=int, default=1)
    parser.add_argument("--seconds", type=float, default=10.0, help="of tests for a mutant, of the most telling ones")
    parser.add_argument("--share", type=int, default=100, help="of a hundred mutants; a larger one goes on later")
    parser.add_argument("--only", choices=["functions", "properties"], help="one half of the run")
    parser.add_argument("--look", action="store_true", help="run nothing, tell what has been found so far")
    options = parser.parse_args()
    rows, unknown = [], []
    for package in options.packages:
        for properties in {"functions": (False,), "properties": (True,)}.get(options.only, (False, True)):
            scratch = (options.scratch / (package + "-properties" * properties)).resolve()
            if not options.look:
                _prepare(package, scratch, properties=properties)
                _run(scratch, options, properties=properties)
            if (scratch / "mutants").exists():
                own = list(_unaccepted(scratch))
                rows.append((scratch.name, counts(scratch), len(own)))
                unknown += own
    for survivor in unknown:
        print(f"{survivor.file} {survivor.function}\n- {survivor.before}\n+ {survivor.after}")
    print(f"\n{'':20}{'mutants':>9}{'by types':>9}{'by tests':>9}{'timeout':>9}{'survive':>9}{'new':>9}{'left':>9}")
    for name, found, new in rows:
        tests, timeouts = found["killed"] + found["segfault"] + found["suspicious"], found["timeout"]
        survive, left = found["survived"] + found["no tests"], found["not checked"]
        cells = (found.total(), found["caught by type check"], tests, timeouts, survive, new, left)
        print(f"{name:20}" + "".join(f"{cell:>9}" for cell in cells))
    sys.exit(1 if unknown else 0)


def _unaccepted(scratch: Path) -> Iterator[Survivor]:
    known = {entry[1:] for entry in accepted()}
    with chdir(scratch):
        for survivor in survivors(scratch):
            if survivor[1:] not in known:
                yield survivor


def _prepare(package: str, scratch: Path, *, properties: bool) -> None:
    """Bring the scratch copy up to date; what mutmut has found in it stays."""
    scratch.mkdir(parents=True, exist_ok=True)
    for name in ("src", "tests"):
        _copy(ROOT / name, scratch / name)
    if (scratch / "mutants" / "tests").exists():
        _copy(ROOT / "tests", scratch / "mutants" / "tests")
    parts, tests = PACKAGES[package]
    types = [sys.executable, "-m", "mypy", "--output=json", "--no-warn-unused-ignores"]
    types = [] if properties else types + [word for part in parts for word in ("-p", f"saccade.{part}")]
    files = [f"src/saccade/{part}/*" for part in parts]
    settings = _SETTINGS.format(files=files, tests=list(tests), types=types)
    (scratch / "pyproject.toml").write_text((ROOT / "pyproject.toml").read_text() + settings)


def _copy(source: Path, target: Path) -> None:
    """Files that differ are written, so that those that were not changed keep their time."""
    for path in source.rglob("*"):
        if path.is_file() and "__pycache__" not in path.parts:
            own = target / path.relative_to(source)
            if not own.exists() or own.read_bytes() != path.read_bytes():
                own.parent.mkdir(parents=True, exist_ok=True)
                shutil.copyfile(path, own)


def _run(scratch: Path, options: argparse.Namespace, *, properties: bool) -> None:
    command = [sys.executable, str(HERE / "mutmut_here.py"), "run", "--max-children", str(options.processes)]
    own = {"OMP_NUM_THREADS": "1", "OMP_WAIT_POLICY": "PASSIVE", "PYTHONPATH": ""}
    own |= {"MUTATION_SECONDS": str(options.seconds), "MUTATION_SHARE": str(options.share)}
    own |= {"MUTATION_PROPERTIES": "1"} if properties else {}
    subprocess.run(command, cwd=scratch, env=os.environ | own, check=False)


if __name__ == "__main__":
    main()
