"""Fixtures that run marked tests both by blocks and by the compiled sweep."""

import pytest


@pytest.fixture(params=["blocks", pytest.param("sweep", marks=pytest.mark.native)])
def either_way(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("saccade.engine.kernels.native_statistics.is_on", lambda: request.param == "sweep")
