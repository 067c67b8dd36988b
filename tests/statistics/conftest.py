"""What tests marked with `either_way` say is so whether blocks answer or a compiled sweep does."""

import pytest


@pytest.fixture(params=["blocks", pytest.param("sweep", marks=pytest.mark.native)])
def either_way(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("saccade.engine.kernels.native_statistics.is_on", lambda: request.param == "sweep")
