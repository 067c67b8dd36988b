"""The public calls have the types that are asserted of them, and every public name is seen without running anything."""

import importlib
import subprocess
import sys
from pathlib import Path

import pytest

HERE = Path(__file__).parent
LAZY = ["saccade", "saccade.masks", "saccade.positions", "saccade.scores", "saccade.statistics"]


def mypy(folder: Path, *paths: str | Path) -> subprocess.CompletedProcess[str]:
    options = ["--strict", "--untyped-calls-exclude=torch", f"--cache-dir={folder / 'cache'}", "--config-file="]
    options.append("--follow-imports=silent")  # the package itself has a check of its own
    command = [sys.executable, "-m", "mypy", *options, *map(str, paths)]
    environment = {"MYPYPATH": str(HERE.parents[2] / "src"), "PATH": ""}
    return subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True, check=False)


@pytest.mark.slow
def test_public_calls_and_names(tmp_path):
    names = tmp_path / "names.py"
    lines = [f"{module}.{name}" for module in LAZY for name in importlib.import_module(module).__all__]
    names.write_text("\n".join([*(f"import {module}" for module in LAZY), *lines]) + "\n", "utf-8")
    done = mypy(tmp_path, HERE / "public_calls.py", names)
    assert done.stdout == "Success: no issues found in 2 source files\n", done.stdout + done.stderr
    names.write_text("import saccade\nsaccade.atention\nsaccade.masks.Cauzal\n", "utf-8")
    told = mypy(tmp_path, names).stdout
    assert 'has no attribute "atention"' in told
    assert 'has no attribute "Cauzal"' in told


@pytest.mark.parametrize("module", LAZY)
def test_names_that_come_late_are_those_that_are_promised(module):
    package = importlib.import_module(module)
    assert len(set(package.__all__)) == len(package.__all__)
    homes = vars(package)["_HOMES"]
    for home, names in homes.items():
        for name in names.split():
            assert home != name, "a module of that name would take the place of what it holds"
            assert name in dir(package)
            assert getattr(package, name) is getattr(package, name)
    with pytest.raises(AttributeError, match=f"module '{module}' has no attribute 'nothing'"):
        _ = package.nothing
