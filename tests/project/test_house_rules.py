"""House rules, read off the syntax of tests and sources."""

import ast
import re
import textwrap
from collections import defaultdict
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
SOURCES, TESTS = ROOT / "src", ROOT / "tests"
CODE = [path for folder in ("src", "tests", "benchmarks", "examples") for path in sorted((ROOT / folder).rglob("*.py"))]
# Each limit is the number of exceptions today. It may only fall.
LONG_FILES = 2  # of more than 400 lines
CLAUSES = 0  # docstrings in src that begin with a relative clause
COMMON_NAMES = 0  # file names in more than two folders of src
COMPARISONS = {"allclose", "array_equal", "equal", "isclose"}
FUNCTIONS = (ast.FunctionDef, ast.AsyncFunctionDef)


def offences(source):
    """Yield (line, rule) for every place in a test file that breaks a house rule."""
    tree = ast.parse(source)
    for node in ast.walk(tree):
        if isinstance(node, ast.Expr) and isinstance(node.value, ast.Call) and called(node.value) in COMPARISONS:
            yield node.lineno, "a comparison must be asserted"
        if isinstance(node, ast.Call) and called(node) == "raises" and not has_match(node):
            yield node.lineno, "pytest.raises must say what it matches"
        if isinstance(node, ast.Try) and any(isinstance(inner, ast.Assert) for inner in ast.walk(node)):
            yield node.lineno, "an assertion must not stand inside try"
        if isinstance(node, FUNCTIONS) and node.name.startswith("test"):
            yield from ((place.lineno, "a test must not return") for place in own_returns(node))


def called(call):
    """Return the last name of the called function: ``equal`` for ``torch.equal(...)``."""
    return getattr(call.func, "attr", getattr(call.func, "id", None))


def has_match(call):
    return any(keyword.arg in ("match", None) for keyword in call.keywords)


def own_returns(function):
    """Yield returns in the body of a function, not in functions that it defines."""
    waiting = list(function.body)
    while waiting:
        node = waiting.pop()
        if isinstance(node, ast.Return):
            yield node
        if not isinstance(node, (*FUNCTIONS, ast.Lambda, ast.ClassDef)):
            waiting.extend(ast.iter_child_nodes(node))


@pytest.mark.parametrize("path", sorted(TESTS.rglob("*.py")), ids=lambda path: str(path.relative_to(TESTS)))
def test_house_rules_hold(path):
    assert list(offences(path.read_text(encoding="utf-8"))) == []


@pytest.mark.parametrize(
    ("source", "rule"),
    [
        ("def test_a():\n    torch.equal(x, y)", "a comparison must be asserted"),
        ("def test_a():\n    allclose(x, y)", "a comparison must be asserted"),
        ("def test_a():\n    return x == y", "a test must not return"),
        ("def test_a():\n    if x:\n        return\n    assert y", "a test must not return"),
        ("def test_a():\n    with pytest.raises(ValueError):\n        f()", "pytest.raises must say what it matches"),
        (
            "def test_a():\n    try:\n        assert x\n    except E:\n        pass",
            "an assertion must not stand inside try",
        ),
    ],
)
def test_an_offence_is_reported(source, rule):
    assert [broken for _, broken in offences(source)] == [rule]


def test_code_that_keeps_the_rules_is_not_reported():
    source = """
        @pytest.fixture
        def answer():
            return 42

        def test_a(answer):
            def helper(x):
                return torch.equal(x, x)

            assert torch.equal(answer, answer)
            assert helper(answer)
            with pytest.raises(ValueError, match="no"):
                helper(None)
        """
    assert list(offences(textwrap.dedent(source))) == []


def clauses(source):
    """Yield the first line of every docstring that begins with a relative clause instead of a verb or a noun."""
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, (ast.Module, ast.ClassDef, *FUNCTIONS)):
            text = ast.get_docstring(node) or ""
            if re.match(r"(What|Where|Who|Whose|Which|Of|Those)\b", text):
                yield text.partition("\n")[0]


def test_docstrings_begin_with_a_verb_or_a_noun():
    broken = [
        f"{path.relative_to(ROOT)}: {line}"
        for path in sorted(SOURCES.rglob("*.py"))
        for line in clauses(path.read_text(encoding="utf-8"))
    ]
    assert len(broken) <= CLAUSES, "\n".join(broken)


def test_a_clause_is_reported():
    source = '"""What it is."""\ndef f():\n    """Whatever."""\nclass A:\n    """Of those that stay."""\n    """Who."""'
    assert sorted(clauses(source)) == ["Of those that stay.", "What it is."]


def test_a_file_name_is_in_at_most_two_folders():
    folders = defaultdict(list)
    for path in sorted(SOURCES.rglob("*.py")):
        if path.stem not in ("__init__", "__main__", "base"):
            folders[path.name].append(str(path.parent.relative_to(SOURCES)))
    broken = {name: places for name, places in folders.items() if len(places) > 2}
    assert len(broken) <= COMMON_NAMES, broken


def test_files_have_at_most_400_lines():
    lines = {str(path.relative_to(ROOT)): path.read_text(encoding="utf-8").count("\n") for path in CODE}
    broken = {name: count for name, count in lines.items() if count > 400}
    assert len(broken) <= LONG_FILES, broken


def test_every_layer_is_in_the_table_of_contributing():
    table = (ROOT / "CONTRIBUTING.md").read_text(encoding="utf-8").partition("\n## Layers\n")[2].partition("\n## ")[0]
    layers = {name for row in re.findall(r"^\| (`.+?) \|", table, re.MULTILINE) for name in re.findall(r"`(\w+)`", row)}
    assert layers == {path.name for path in (SOURCES / "saccade").iterdir() if (path / "__init__.py").exists()}
