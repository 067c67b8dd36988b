"""A mutation run: each package is changed in one place at a time, and some test must notice.

``python tests/mutation/run.py [package ...]`` makes a scratch copy for each package, runs mutmut in it, and prints a
table. What survives is compared with the lists in ``accepted/``: a survivor that stands in none of them fails the run.
A run that was stopped goes on where it was. mutmut leaves out functions with decorators, properties among them.
"""

from __future__ import annotations

import argparse
import os
import shutil
import subprocess
import sys
from pathlib import Path

HERE = Path(__file__).parent
ROOT = HERE.parent.parent

# The tests that are run for a package, in short ones and few; `make test` runs all.
TESTS = {
    "masks": ["tests/masks", "tests/test_plan.py"],
}
ALSO = {"masks": ["plan"]}
_SETTINGS = """
[tool.mutmut]
source_paths = ["src"]
only_mutate = {files}
pytest_add_cli_args_test_selection = {tests}
pytest_add_cli_args = ["-m", "not slow and not gpu", "-p", "no:cacheprovider", "-p", "no:xdist"]
process_isolation = "forkserver"
use_git_change_detection = false
track_dependencies = false
timeout_multiplier = 4.0
timeout_constant = 10.0
type_check_command = {types}
"""


def prepare(package: str, scratch: Path) -> None:
    """Bring the scratch copy up to date; what mutmut has found in it stays."""
    scratch.mkdir(parents=True, exist_ok=True)
    for name in ("src", "tests"):
        _copied(ROOT / name, scratch / name)
    if (scratch / "mutants" / "tests").exists():
        _copied(ROOT / "tests", scratch / "mutants" / "tests")
    types = [sys.executable, "-m", "mypy", "--output=json", "--no-warn-unused-ignores", ]
    own = [package, *ALSO.get(package, [])]
    types += [word for name in own for word in ("-p", f"saccade.{name}")]
    files = [f"src/saccade/{name}/*" for name in own]
    settings = _SETTINGS.format(files=files, tests=TESTS[package], types=types)
    (scratch / "pyproject.toml").write_text((ROOT / "pyproject.toml").read_text() + settings)


def _copied(source: Path, target: Path) -> None:
    """Files that differ are written, so that what was not changed keeps its time."""
    for path in source.rglob("*"):
        if "__pycache__" in path.parts or not path.is_file():
            continue
        own = target / path.relative_to(source)
        if not own.exists() or own.read_bytes() != path.read_bytes():
            own.parent.mkdir(parents=True, exist_ok=True)
            shutil.copyfile(path, own)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("packages", nargs="*", default=list(TESTS))
    parser.add_argument("--scratch", type=Path, default=Path("out/mutants"))
    parser.add_argument("--processes", type=int, default=1)
    options = parser.parse_args()
    for package in options.packages:
        scratch = options.scratch / package
        prepare(package, scratch)
        command = [sys.executable, str(HERE / "mutmut_here.py"), "run", "--max-children", str(options.processes)]
        alone = {"OMP_NUM_THREADS": "1", "OMP_WAIT_POLICY": "PASSIVE", "PYTHONPATH": ""}
        subprocess.run(command, cwd=scratch, env=os.environ | alone, check=False)


if __name__ == "__main__":
    main()
