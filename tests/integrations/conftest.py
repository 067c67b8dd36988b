"""Fixtures of several files."""

import pytest
import torch


@pytest.fixture
def fast_path(monkeypatch):
    """Return a list that gets an entry each time torch takes its fast path."""
    taken = []
    original = torch._transformer_encoder_layer_fwd
    monkeypatch.setattr(torch, "_transformer_encoder_layer_fwd", lambda *a: taken.append(1) or original(*a))
    return taken
