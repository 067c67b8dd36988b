"""What tests marked with `either_way` say is so whether blocks answer or a compiled sweep does."""

import pytest

from saccade.engine.kernels.native import abilities


@pytest.fixture(params=["blocks", "sweep"] if abilities() is not None else ["blocks"])
def either_way(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("saccade.engine.kernels.native_look.is_on", lambda: request.param == "sweep")
