"""``pytest --saccade-audit``: audits of models among your own tests.

A module beside saccade, not in it: pytest imports it at every start, and ``import saccade`` imports torch.
"""

from __future__ import annotations

from collections.abc import Callable, Generator, Iterable
from typing import TYPE_CHECKING, Any

import pytest

if TYPE_CHECKING:
    from saccade.auditing import Report

__all__ = ["audit"]

_WHY_SKIPPED = "audits run with --saccade-audit"
_MARKER = "reach(rule=None, **options): an audit of a model, run with --saccade-audit; what saccade.audit takes"
_REPORTS = pytest.StashKey[list["Report"]]()


def pytest_addoption(parser: pytest.Parser) -> None:
    """Add the option."""
    text = "run tests marked reach: which token reaches which in a model"
    parser.getgroup("saccade").addoption("--saccade-audit", action="store_true", help=text)


def pytest_configure(config: pytest.Config) -> None:
    """Add the marker."""
    config.addinivalue_line("markers", _MARKER)


def pytest_collection_modifyitems(config: pytest.Config, items: Iterable[pytest.Item]) -> None:
    """Skips audits that nobody asked for, before anything is made for them."""
    for item in items if not config.getoption("--saccade-audit") else ():
        if item.get_closest_marker("reach") is not None:
            item.add_marker(pytest.mark.skip(reason=_WHY_SKIPPED))


@pytest.fixture
def audit(request: pytest.FixtureRequest) -> Callable[..., Report]:
    """`saccade.audit`, which fails the test where a claim is broken.

    ``audit(model)`` takes the rule and the options of the marker ``reach``, and what it is given itself before these;
    without a rule, that of the model's configuration.
    """
    if not request.config.getoption("--saccade-audit"):
        pytest.skip(_WHY_SKIPPED)
    import saccade  # noqa: PLC0415  here first, since it imports torch

    marker = request.node.get_closest_marker("reach")
    told = {} if marker is None else _reach(*marker.args, **marker.kwargs)
    request.node.stash[_REPORTS] = reports = []

    def audited(model: Callable[..., Any], rule: Any = None, **options: Any) -> Report:
        __tracebackhide__ = True
        report = saccade.audit(model, **told | options | ({} if rule is None else {"rule": rule}))
        reports.append(report)
        if not report.ok:
            pytest.fail(f"the model does not keep the rule\n{report}")
        return report

    return audited


def _reach(rule: Any = None, **options: Any) -> dict[str, Any]:
    """Return the arguments of a marker, by name."""
    return options | {"rule": rule}


@pytest.hookimpl(wrapper=True)
def pytest_runtest_call(item: pytest.Item) -> Generator[None, None, None]:
    """Fails a test that says that it audits and does not."""
    yield
    if item.get_closest_marker("reach") is not None and not item.stash.get(_REPORTS, []):
        pytest.fail("a test marked reach must take the fixture audit and call it with a model", pytrace=False)


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item: pytest.Item) -> Generator[None, pytest.TestReport, pytest.TestReport]:
    """Add a section with the lines that show a leak without saccade."""
    shown = yield
    if shown.when == "call" and shown.failed:
        scripts = [report.script for report in item.stash.get(_REPORTS, []) if report.script]
        shown.sections += [("the leak without saccade", script) for script in scripts]
    return shown
