"""Tests that are collected once: a mutant costs a fork and the tests that reach it, but no start of pytest.

Tests run in the order of what they have caught before, in the same function and in the same file, then of the time
they take.
"""

from __future__ import annotations

import glob
import os
import signal
from collections import Counter
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import mutmut.__main__ as mutmut
from mutmut.configuration import config
from mutmut.runners.harness import PytestRunner
from mutmut.state import state
from mutmut.utils.file_utils import change_cwd
from mutmut.utils.format_utils import mangled_name_from_mutant_name
from mutmut.workers.isolation import ForkServerRunner

_TIMEOUT = 36  # what mutmut takes for one
_FOLDER = Path("..", "caught")


def install(seconds: float) -> None:
    """Make mutmut run tests this way: for a mutant, no further test is begun after so many seconds of them."""

    def runner(max_workers: int = 1) -> ForkServerRunner:
        return ForkServerRunner(max_workers, Collected, {"seconds": seconds}, debug=config().debug)

    mutmut.get_mutant_runner = runner


class Collected(PytestRunner):
    """A session that has been collected, and is forked for each mutant."""

    def __init__(self, seconds: float) -> None:
        super().__init__()
        self._seconds = seconds
        self._session: Any = None

    def warm_up(self) -> None:
        from _pytest.config import _prepareconfig  # noqa: PLC0415  the parent stays free of pytest
        from _pytest.main import Session  # noqa: PLC0415

        with change_cwd("mutants"):
            given = [*self._pytest_add_cli_args, *self._pytest_add_cli_args_test_selection]
            settings = _prepareconfig(["--rootdir=.", "--tb=native", "-q", "-s", *given])
            settings._do_configure()
            self._session = Session.from_config(settings)
            settings.hook.pytest_sessionstart(session=self._session)
            settings.hook.pytest_collection(session=self._session)

    def run_forced_fail(self) -> int:
        return 1  # that mutants are noticed at all shows in the first ones

    def run_tests(self, *, mutant_name: str | None, tests: Iterable[str]) -> int:
        if mutant_name is None:
            return 0  # all have just passed, to learn which function each reaches
        if self._session is None:
            self.warm_up()
        with change_cwd("mutants"):
            return self._run(mutant_name, set(tests))

    def _run(self, mutant_name: str | None, tests: set[str]) -> int:
        durations = state().duration_by_test
        items = [item for item in self._session.items if not tests or item.nodeid in tests]
        function = mangled_name_from_mutant_name(mutant_name) if mutant_name else ""
        caught = _Caught(function)
        first, near = caught.read(), caught.read_near()
        # The first few of a test's many parameters come first: they differ less than tests do. Tests that have caught
        # something before come first of all, unless they take so long that others would not be run.
        times: dict[str, int] = {}
        order: dict[str, tuple[float, float, float]] = {}
        for item in items:
            test, own = item.nodeid.partition("[")[0], durations.get(item.nodeid, 0.0)
            times[test] = times.get(test, 0) + 1
            before, beside = (x.get(item.nodeid, 0) if own < self._seconds / 8 else 0 for x in (first, near))
            order[item.nodeid] = (-before, -beside, own + 0.005 * times[test])
        items.sort(key=lambda item: order[item.nodeid])
        if mutant_name:
            signal.signal(signal.SIGPROF, lambda *_: os._exit(_TIMEOUT))
        spent = 0.0
        for item, following in zip(items, [*items[1:], None], strict=True):
            own = durations.get(item.nodeid, 0.0)
            if mutant_name:
                if spent > self._seconds:
                    return 0
                signal.setitimer(signal.ITIMER_PROF, 3 + 10 * own)
            item.config.hook.pytest_runtest_protocol(item=item, nextitem=following)
            spent += own
            if self._session.testsfailed:
                caught.add(item.nodeid)
                return 1
        return 0


class _Caught:
    """The tests that have caught mutants of a function, with counts."""

    def __init__(self, function: str) -> None:
        self._file = _FOLDER / f"{function.replace(os.sep, '_')}.txt" if function else None

    def read(self) -> dict[str, int]:
        return Counter() if self._file is None or not self._file.exists() else _counted([self._file])

    def read_near(self) -> dict[str, int]:
        """Return the same for all functions of the file."""
        if self._file is None:
            return Counter()
        module = self._file.stem.rpartition(".")[0]
        return _counted(_FOLDER.glob(f"{glob.escape(module)}.x*.txt"))

    def add(self, test: str) -> None:
        if self._file is not None:
            self._file.parent.mkdir(exist_ok=True)
            with self._file.open("a") as lines:
                lines.write(test + "\n")


def _counted(files: Iterable[Path]) -> Counter[str]:
    return Counter(line for file in files for line in file.read_text().splitlines())
