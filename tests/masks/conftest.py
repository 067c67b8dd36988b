"""Fixtures of masks."""

import pytest


@pytest.fixture
def however_small(monkeypatch: pytest.MonkeyPatch) -> None:
    """Search bool masks for a rule, however small the product is."""
    monkeypatch.setattr("saccade.masks.convert.recognise_tensor._MIN_PAIRS", 0)
