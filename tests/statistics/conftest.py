"""Every test of statistics runs over blocks and, where saccade-cpu is installed, with what its sweep finds."""

import pytest

from saccade.engine.kernels.native import abilities

WAYS = ["blocks", "sweep"] if abilities() is not None else ["blocks"]


@pytest.fixture(autouse=True, params=WAYS)
def _way(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("saccade.engine.kernels.native_look.is_on", lambda: request.param == "sweep")
