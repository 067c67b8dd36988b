"""House rules for tests, read off their syntax: a comparison that nobody asserts proves nothing."""

import ast
import textwrap
from pathlib import Path

import pytest

TESTS = Path(__file__).parents[1]
COMPARISONS = {"allclose", "array_equal", "equal", "isclose"}
FUNCTIONS = (ast.FunctionDef, ast.AsyncFunctionDef)


def offences(source):
    """(line, rule) for every place in a test file that breaks a house rule."""
    tree = ast.parse(source)
    for node in ast.walk(tree):
        if isinstance(node, ast.Expr) and isinstance(node.value, ast.Call) and called(node.value) in COMPARISONS:
            yield node.lineno, "a comparison must be asserted"
        if isinstance(node, ast.Call) and called(node) == "raises" and not has_match(node):
            yield node.lineno, "pytest.raises must say what it matches"
        if isinstance(node, ast.Try) and any(isinstance(inner, ast.Assert) for inner in ast.walk(node)):
            yield node.lineno, "an assertion must not stand inside try"
        if isinstance(node, FUNCTIONS) and node.name.startswith("test"):
            yield from ((found.lineno, "a test must not return") for found in own_returns(node))


def called(call):
    """The last name of what is called: ``equal`` for ``torch.equal(...)``."""
    return getattr(call.func, "attr", getattr(call.func, "id", None))


def has_match(call):
    return any(keyword.arg in ("match", None) for keyword in call.keywords)


def own_returns(function):
    """Returns in a function's own body, not in functions that it defines."""
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
def test_an_offence_is_found(source, rule):
    assert [found for _, found in offences(source)] == [rule]


def test_what_is_allowed_is_not_an_offence():
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
