"""The lists of mutants that may survive: each entry gives a reason, and is about a line that there is."""

import ast
import re
import sys
from fnmatch import fnmatchcase
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[3]
with pytest.MonkeyPatch.context() as patch:
    patch.syspath_prepend(ROOT / "tests" / "project" / "mutation")
    from accepted import accepted, is_whole

    sys.modules.pop("accepted")
SOURCE = ROOT / "src" / "saccade"


def _plain(code: str) -> str:
    """Code without what formatting adds."""
    return re.sub(r",?([)\]])", r"\1", re.sub(r"\s+", "", code)).rstrip(",")


def test_every_entry_gives_a_reason():
    assert [entry for entry in accepted() if len(entry.reason.split()) < 3] == []


def test_every_entry_is_about_a_line_that_there_is():
    texts = {path: _plain(path.read_text("utf-8")) for path in SOURCE.rglob("*.py")}
    named = [entry for entry in accepted() if "*" not in entry.file]
    assert [entry for entry in named if SOURCE / entry.file not in texts] == []
    lines = [entry for entry in named if entry.before is not None]
    assert [entry for entry in lines if _plain(entry.before) not in texts[SOURCE / entry.file]] == []


def test_every_entry_names_a_function_that_there_is():
    names = {}
    for entry in accepted():
        if "*" not in entry.file and entry.file not in names:
            tree = ast.parse((SOURCE / entry.file).read_text("utf-8"))
            functions = [node.name for node in tree.body if isinstance(node, ast.FunctionDef)]
            classes = [node for node in tree.body if isinstance(node, ast.ClassDef)]
            methods = [(c.name, node) for c in classes for node in c.body]
            names[entry.file] = functions + [f"{c}.{f.name}" for c, f in methods if isinstance(f, ast.FunctionDef)]
    named = {entry[1:3] for entry in accepted() if "*" not in entry.file}
    unknown = [x for x in sorted(named) if not any(fnmatchcase(name, x[1]) for name in names[x[0]])]
    assert unknown == []


def test_no_entry_stands_twice():
    entries = [entry[1:] for entry in accepted() if entry.before is not None]
    assert [entry for entry in set(entries) if entries.count(entry) > 1] == []


def test_a_function_is_accepted_whole_by_its_name_alone():
    entries = accepted()
    assert is_whole(entries, "plan/layout.py", "Layout.cost")
    assert not is_whole(entries, "plan/layout.py", "Layout.tiles")
