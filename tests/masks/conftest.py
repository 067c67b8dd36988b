"""Fixtures of masks."""

import pytest


@pytest.fixture
def however_small(monkeypatch: pytest.MonkeyPatch) -> None:
    """However small a product is, its bool mask is looked at for a rule."""
    monkeypatch.setattr("saccade.masks.convert.recognise_tensor._MIN_PAIRS", 0)
