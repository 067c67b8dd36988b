"""The public surface: every name is documented, every parameter is in the glossary, every example runs."""

import doctest
import importlib
import inspect
import pkgutil
import re
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType

import pytest
import torch

import saccade

DOCS = Path(__file__).parents[2] / "docs"
PACKAGES = (
    "",
    ".masks",
    ".scores",
    ".positions",
    ".statistics",
    ".caches",
    ".tasks",
    ".learning",
    ".mechanisms",
    ".scorers",
    ".nn",
    ".vision",
    ".models",
    ".text",
    ".viz",
    ".costs",
    ".recording",
    ".auditing",
    ".distributed",
    ".integrations.transformers",
    ".testing",
    ".theory",
)


def _glossary(language: str) -> list[str]:
    page = (DOCS / language / "glossary.md").read_text(encoding="utf-8")
    return re.findall(r"^\| `(\w+)` \| .+ \|$", page, re.MULTILINE)


def _modules() -> Iterator[ModuleType]:
    yield saccade
    for info in pkgutil.walk_packages(saccade.__path__, "saccade."):
        yield importlib.import_module(info.name)


def _public() -> dict[str, object]:
    """Functions and classes that users import, by the name under which they do."""
    modules = [importlib.import_module(f"saccade{package}") for package in PACKAGES]
    return {f"{module.__name__}.{name}": thing for module in modules for name, thing in _signed(module).items()}


def _public_names(module: ModuleType) -> list[str]:
    """Return the names that a package exports, or those without an underscore that a module defines."""
    defined = [name for name, thing in vars(module).items() if getattr(thing, "__module__", "") == module.__name__]
    return getattr(module, "__all__", [name for name in defined if not name.startswith("_")])


def _signed(module: ModuleType) -> dict[str, object]:
    """Return the public functions and classes of a module that have a signature of their own."""
    found = {}
    for name in _public_names(module):
        thing = getattr(module, name)
        is_plain_error = inspect.isclass(thing) and issubclass(thing, Exception) and "__init__" not in vars(thing)
        if (inspect.isfunction(thing) or inspect.isclass(thing)) and not is_plain_error:
            found[name] = thing
    return found


def _callables(name: str, thing: object) -> Iterator[tuple[str, object]]:
    yield name, thing
    if inspect.isclass(thing):
        for member, method in vars(thing).items():
            if not member.startswith("_") and inspect.isfunction(method):
                yield f"{name}.{member}", method


GLOSSARY = _glossary("en")
MODULES = list(_modules())
PUBLIC = _public()


@pytest.mark.parametrize("name", PUBLIC)
def test_parameters_are_in_the_glossary(name: str) -> None:
    spoken = {*GLOSSARY, "self", "args", "kwargs"}
    for full_name, thing in _callables(name, PUBLIC[name]):
        unknown = [parameter for parameter in inspect.signature(thing).parameters if parameter not in spoken]
        assert not unknown, f"{full_name} has parameters that docs/en/glossary.md does not know"


@pytest.mark.parametrize("module", MODULES, ids=lambda module: module.__name__)
def test_defaults_fit_a_line_of_help(module: ModuleType) -> None:
    for name, thing in _signed(module).items():
        for full_name, own in _callables(name, thing):
            for parameter in inspect.signature(own).parameters.values():
                assert len(repr(parameter.default)) <= 120, f"{module.__name__}.{full_name}: {parameter.name}"


def test_the_glossary_has_one_meaning_a_word_and_no_dead_words() -> None:
    assert len(GLOSSARY) == len(set(GLOSSARY))
    assert _glossary("zh") == GLOSSARY
    used = {
        parameter
        for name, thing in PUBLIC.items()
        for _, own in _callables(name, thing)
        for parameter in inspect.signature(own).parameters
    }
    assert set(GLOSSARY) <= used | {"head_dim", "path", "state_dict"}


@pytest.mark.parametrize("module", MODULES, ids=lambda module: module.__name__)
def test_every_public_name_is_documented(module: ModuleType) -> None:
    assert module.__doc__
    for name in _public_names(module):
        thing = getattr(module, name)
        if not (inspect.isfunction(thing) or inspect.isclass(thing)):
            continue
        assert inspect.getdoc(thing), f"{module.__name__}.{name} has no docstring"
        for member, method in vars(thing).items() if inspect.isclass(thing) else ():
            if not member.startswith("_") and (inspect.isfunction(method) or isinstance(method, property)):
                inherited = any(inspect.getdoc(getattr(base, member, None)) for base in thing.__mro__)
                assert inherited, f"{module.__name__}.{name}.{member} has no docstring"


@pytest.mark.usefixtures("without_native")
@pytest.mark.parametrize("module", MODULES, ids=lambda module: module.__name__)
def test_examples_run(module: ModuleType) -> None:
    runner = doctest.DocTestRunner()
    for docstring in doctest.DocTestFinder().find(module, extraglobs={"torch": torch}):
        if docstring.examples:  # a run of none looks through all source files that Python has ever shown
            assert runner.run(docstring).failed == 0
