"""``pytest --saccade-audit`` and ``--saccade-kernel``: audits of models and laws of kernels among your own tests.

This module is outside the saccade package because pytest imports it at every start, and ``import saccade`` imports
torch.
"""

from __future__ import annotations

import functools
import re
import secrets
import tempfile
from collections.abc import Callable, Generator, Iterable
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

if TYPE_CHECKING:
    from saccade.auditing import Report
    from saccade.testing.judging import CounterExample, Judgement, Kernel

__all__ = ["audit"]

_WHY_SKIPPED = "audits run with --saccade-audit"
_MARKER = "reach(rule=None, **options): an audit of a model, run with --saccade-audit; what saccade.audit takes"
_REPORTS = pytest.StashKey[list["Report"]]()
_NOTES = pytest.StashKey[list[str]]()
_MOST_SHOWN = 8  # differences that a script prints


def pytest_addoption(parser: pytest.Parser) -> None:
    """Add the options of audits and of kernels to pytest."""
    group = parser.getgroup("saccade")
    text = "run tests marked reach: which token reaches which in a model"
    group.addoption("--saccade-audit", action="store_true", help=text)
    text = "add a test for each law of attention: file.py::name, library.so::name or module:name"
    group.addoption("--saccade-kernel", metavar="KERNEL", help=text)
    text = "what the kernel claims: a TOML file, or file.py::NAME of a dict"
    group.addoption("--saccade-claims", metavar="FILE", help=text)
    group.addoption("--saccade-device", default="cpu", help="where the inputs of the kernel are")
    group.addoption("--saccade-seed", type=int, help="the seed of all values; a new one if left out")
    text = "where to write a script for each broken law of the kernel; by default pytest's cache"
    group.addoption("--saccade-scripts", metavar="FOLDER", type=Path, help=text)


def pytest_configure(config: pytest.Config) -> None:
    """Register the marker ``reach`` with pytest."""
    config.addinivalue_line("markers", _MARKER)


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(session: pytest.Session, config: pytest.Config, items: list[pytest.Item]) -> None:
    """Add a test for each law if a kernel is given, and skip audits if ``--saccade-audit`` is not given."""
    items += _laws(session, config)
    for item in items if not config.getoption("--saccade-audit") else ():
        if item.get_closest_marker("reach") is not None:
            item.add_marker(pytest.mark.skip(reason=_WHY_SKIPPED))


def _laws(session: pytest.Session, config: pytest.Config) -> Iterable[pytest.Item]:
    """Return a test for each law of the kernel that the command line names."""
    name = config.getoption("--saccade-kernel")
    if name is None:
        return []
    from saccade.testing.judging import (  # noqa: PLC0415  imports torch
        Kernel,
        Source,
        check_interpreter,
        first_calls,
        judge,
        read_claims,
    )

    device, seed = config.getoption("--saccade-device"), config.getoption("--saccade-seed")
    seed = secrets.randbelow(1 << 32) if seed is None else seed
    try:
        source = Source.parse(name)
        check_interpreter(source, device)
        kernel = Kernel.of(source.load(), read_claims(config.getoption("--saccade-claims")), source)
    except (ValueError, TypeError, OSError) as error:
        raise pytest.UsageError(f"--saccade-kernel: {error}") from None

    @functools.cache  # called by the first test that runs
    def called() -> Kernel:
        found = first_calls(kernel, device)
        config.stash[_NOTES] = [*found.notes, f"seed {seed}: --saccade-seed {seed} repeats this run"]
        return found

    def judged(law: str) -> Judgement:
        return judge(called(), laws=[law], device=device, seed=seed)

    laws = kernel.form.laws_to_check()
    return [LawTest.from_parent(session, name=f"{name}::{law}", law=law.name, judge=judged) for law in laws]


class LawTest(pytest.Item):
    """A test that tries one law of attention on a kernel."""

    def __init__(self, *, law: str, judge: Callable[[str], Judgement], **options: Any):
        super().__init__(**options)
        self.law, self.judge = law, judge

    def runtest(self) -> None:
        """Try the law: fail with the smallest counter-example, or skip if no case can be tried."""
        found = self.judge(self.law)
        (law,) = found.report.laws
        verdict = found.verdict(law)
        if verdict == "not tried":
            pytest.skip(found.why(law))
        if verdict == "expected":
            pytest.xfail(found.why(law))
        if verdict == "unexpectedly kept" and self.config.getini("xfail_strict"):
            pytest.fail(f"expected to fail, but kept: {', '.join(found.passing_xfail)}", pytrace=False)
        for example in found.counter_examples:
            script = f"script: {self._write(example)}" if example.script else f"no script: {example.no_script}"
            shown = example.shows[:_MOST_SHOWN]
            lines = (law.statement, example.message, example.inputs, *shown, script, f"seed {found.report.seed}")
            pytest.fail("\n".join(lines), pytrace=False)

    def _write(self, example: CounterExample) -> Path:
        """Write the script of a counter-example, and return its path, relative to the current folder if it is below."""
        folder = self.config.getoption("--saccade-scripts")
        if folder is None:
            cache = getattr(self.config, "cache", None)  # None with -p no:cacheprovider
            folder = Path(tempfile.mkdtemp(prefix="saccade-")) if cache is None else cache.mkdir("saccade")
        folder.mkdir(parents=True, exist_ok=True)
        path: Path = folder / (re.sub(r"[^\w.-]+", "-", self.name) + ".py")
        path.write_text(example.script, encoding="utf-8")
        return path.relative_to(Path.cwd()) if path.is_relative_to(Path.cwd()) else path

    def reportinfo(self) -> tuple[Path, None, str]:
        """Return where the test comes from, and its name."""
        return self.path, None, self.name


@pytest.fixture
def audit(request: pytest.FixtureRequest) -> Callable[..., Report]:
    """Return a `saccade.audit` that fails the test if a claim is broken, or the text is too short for the given rule.

    ``audit(model)`` uses the rule and options of the marker ``reach``; its own arguments take precedence. Without a
    rule, it uses that of the model's configuration.
    """
    if not request.config.getoption("--saccade-audit"):
        pytest.skip(_WHY_SKIPPED)
    import saccade  # noqa: PLC0415  here first, since it imports torch
    from saccade.support.language import in_language  # noqa: PLC0415

    marker = request.node.get_closest_marker("reach")
    told = {} if marker is None else _reach(*marker.args, **marker.kwargs)
    request.node.stash[_REPORTS] = reports = []

    def audited(model: Callable[..., Any], rule: Any = None, **options: Any) -> Report:
        __tracebackhide__ = True
        report = saccade.audit(model, **told | options | ({} if rule is None else {"rule": rule}))
        reports.append(report)
        with in_language("en"):  # as all errors
            if not report.ok:
                pytest.fail(f"the model does not follow the rule\n{report}")
            if report.too_short and not report.rule.startswith("assumed"):
                pytest.fail(f"{report.too_short}\n{report}")
        return report

    return audited


def _reach(rule: Any = None, **options: Any) -> dict[str, Any]:
    """Return the arguments of the marker ``reach``, by name."""
    return options | {"rule": rule}


@pytest.hookimpl(wrapper=True)
def pytest_runtest_call(item: pytest.Item) -> Generator[None, None, None]:
    """Fail a test that has the marker ``reach`` but does not run an audit."""
    yield
    if item.get_closest_marker("reach") is not None and not item.stash.get(_REPORTS, []):
        pytest.fail("a test marked reach must take the fixture audit and call it with a model", pytrace=False)


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item: pytest.Item) -> Generator[None, pytest.TestReport, pytest.TestReport]:
    """Add a report section with code that reproduces a leak without saccade."""
    shown = yield
    if shown.when == "call" and shown.failed:
        scripts = [report.script for report in item.stash.get(_REPORTS, []) if report.script]
        shown.sections += [("the leak without saccade", script) for script in scripts]
    return shown


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter, config: pytest.Config) -> None:
    """Print what the kernel does not take although its claims do not say so, and the seed."""
    for line in config.stash.get(_NOTES, []):
        terminalreporter.write_line(f"{config.getoption('--saccade-kernel')}: {line}")
