"""The installed package under both type checkers: scripts of ours need no word to be told what they get."""

import json
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[3]
CHECKED = [ROOT / "examples" / "short", ROOT / "tests" / "project" / "typed" / "public_calls.py"]

pytestmark = pytest.mark.slow


@pytest.fixture
def scripts(installed):
    """Copies, from where the checkout is not seen."""
    for path in CHECKED:
        for script in path.glob("*.py") if path.is_dir() else [path]:
            (installed.empty / script.name).write_text(script.read_text("utf-8"), "utf-8")
    return sorted(path.name for path in installed.empty.glob("*.py"))


def test_scripts_have_no_ignores():
    texts = [path.read_text("utf-8") for path in (ROOT / "examples" / "short").glob("*.py")]
    assert texts
    assert not any("type: ignore" in text or "pyright:" in text for text in texts)


def test_mypy(installed, scripts):
    untyped = [f"--untyped-calls-exclude={package}" for package in ("torch", "transformers")]  # functions of theirs
    options = ["--strict", *untyped, "--cache-dir=cache"]
    python = installed.folder / "bin" / "python"
    said = installed.run("python", "-m", "mypy", *options, "--python-executable", str(python), *scripts)
    assert f"no issues found in {len(scripts)} source files" in said


def test_pyright(installed, scripts):
    python = str(installed.folder / "bin" / "python")
    said = json.loads(installed.run("python", "-m", "pyright", "--outputjson", "--pythonpath", python, *scripts))
    assert said["summary"]["filesAnalyzed"] == len(scripts)
    assert [one for one in said["generalDiagnostics"] if one["severity"] == "error"] == []
